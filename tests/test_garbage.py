"""Reference cycles are looked for rarely while a step is captured and planned, and as before afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

import memopt
from examples.models.families import loss_of
from memopt.planning.call_planner import CallPlanner
from memopt.progress import rare_collections
from tests.marks import slow
from tests.shortened import SHORT

DEFAULT = (700, 10, 10)


@pytest.fixture(autouse=True)
def default_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*DEFAULT)
    yield
    gc.set_threshold(*before)


@pytest.mark.plans_always
@pytest.mark.parametrize("ahead", [True, slow(False)], ids=["ahead", "at the first step"])
def test_while_a_step_is_planned(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    own = CallPlanner.traced

    def noting(*args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(gc.get_threshold())
        return own(*args, **kwargs)

    monkeypatch.setattr(CallPlanner, "traced", noting)
    family = SHORT["gpt2-sdpa"]
    model, batch = family.make(), family.batch("usual")
    memopt.optimize(model, 1.0, precision="fp32", **({"example_inputs": batch} if ahead else {}))
    loss_of(model(**batch)).backward()
    assert seen
    assert min(seen) > DEFAULT
    assert gc.get_threshold() == DEFAULT


def test_after_an_error() -> None:
    with pytest.raises(ValueError, match="no plan"), rare_collections():
        raise ValueError("no plan")
    assert gc.get_threshold() == DEFAULT


def test_the_last_of_several_threads_brings_the_thresholds_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rare_collections():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with rare_collections():
        thread.start()
        inside.wait()
    assert gc.get_threshold() > DEFAULT, "the other thread is still planning"
    leave.set()
    thread.join()
    assert gc.get_threshold() == DEFAULT


@pytest.mark.parametrize(
    ("before", "during"),
    [((0, 10, 10), (0, 10, 10)), ((10**6, 10, 10**3), (10**6, 50, 10**3))],
    ids=["turned off", "rarer already"],
)
def test_a_users_own_thresholds(before: tuple[int, int, int], during: tuple[int, int, int]) -> None:
    gc.set_threshold(*before)
    with rare_collections():
        assert gc.get_threshold() == during
    assert gc.get_threshold() == before
