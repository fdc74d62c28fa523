"""The figures of a step result, and when they are read from the device."""

from __future__ import annotations

import pytest
import torch

from memopt import StepResult
from memopt.train.scaling import _Verdict

LOSS, SCALE, NORM = torch.tensor(1.25), torch.tensor(1024.0), torch.tensor(0.5)


@pytest.mark.parametrize(
    ("result", "flags", "text"),
    [
        (StepResult(LOSS, SCALE), (False, False, False), "loss 1.25, the effective batch is not complete yet"),
        (
            StepResult(LOSS, SCALE, NORM, _Verdict(False)),
            (True, True, False),
            "loss 1.25, gradient norm 0.5, scale 1024, stepped",
        ),
        (
            StepResult(LOSS, SCALE, NORM, _Verdict(torch.tensor(1.0))),
            (True, False, True),
            "loss 1.25, gradient norm 0.5, scale 1024, skipped",
        ),
    ],
)
def test_what_it_says(result: StepResult, flags: tuple[bool, bool, bool], text: str) -> None:
    assert (result.complete, result.stepped, result.skipped) == flags
    assert str(result) == text


def test_a_verdict_on_the_host_costs_nothing() -> None:
    assert _Verdict(True).on_host
    assert _Verdict(torch.tensor(0.0)).on_host
    assert not _Verdict(torch.zeros((), device="meta")).on_host
