"""Schedulers and warnings after an effective batch, also when its verdict is known late."""

from __future__ import annotations

import warnings

import pytest
import torch

from memopt.train.scaling import FollowUp, StepResult, _Verdict


class Scheduler:
    steps = 0

    def step(self) -> None:
        self.steps += 1


class Late(_Verdict):
    """As one that is still on a GPU."""

    on_host = False  # type: ignore[assignment]


def result(skipped: bool, loss: float = 1.0, *, late: bool = False) -> StepResult:
    return StepResult(torch.tensor(loss), torch.tensor(1.0), torch.tensor(1.0), (Late if late else _Verdict)(skipped))


def test_schedulers_step_after_steps_only() -> None:
    first, second = Scheduler(), Scheduler()
    follow_up = FollowUp([first, second], scale_adapts=True)
    for skipped in (False, True, False):
        follow_up.take(3, result(skipped))
    assert (first.steps, second.steps) == (2, 2)


def test_a_late_verdict_is_followed_up_once_when_asked() -> None:
    scheduler = Scheduler()
    follow_up = FollowUp([scheduler], scale_adapts=False)
    follow_up.take(3, result(False, late=True))
    assert scheduler.steps == 0
    follow_up.settle()
    follow_up.settle()
    assert scheduler.steps == 1
    follow_up.take(3, result(False, late=True))
    follow_up.forget()
    follow_up.settle()
    assert scheduler.steps == 1


@pytest.mark.parametrize(
    ("loss", "adapts", "said"), [(1.0, True, False), (1.0, False, True), (float("nan"), True, True)]
)
def test_what_no_smaller_scale_mends_is_said_once(loss: float, adapts: bool, said: bool) -> None:
    follow_up = FollowUp([], scale_adapts=adapts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (3, 4):
            follow_up.take(number, result(True, loss))
    assert [str(warning.message)[:19] for warning in caught] == ["step 3 was skipped:"] * said
