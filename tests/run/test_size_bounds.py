"""The largest sizes that calls are planned for."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from memopt.planning.situation import Situation
from tests.run.pieces import calls_of, latest, make

pytestmark = pytest.mark.plans_always  # the plain steps would fit


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 32)


def test_the_input_bytes_of_a_plan_are_those_of_the_largest_sizes_whatever_batch_came_first() -> None:
    calls = calls_of(make(), dynamic=({0: Dim("rows", max=128)},))
    found = []
    for count in (16, 100):
        call = ((rows(count),), {})
        captured = calls.recorded.capture_whole(call)
        assert captured is not None
        (_, _, account), *_ = calls.planner.candidates(captured, call, Situation(), calls.planner.search(Situation()))
        found.append(account.inputs)
    assert found == [128 * 32 * 4] * 2


def test_sizes_that_grow_are_planned_for_with_a_margin() -> None:
    calls = calls_of(make())
    size_bounds = []
    for count in (16, 20, 24, 30):
        calls(rows(count)).backward()
        plan = latest(calls)
        assert plan is not None
        assert plan.captured is not None
        size_bounds.append(tuple(plan.captured.data_sizes.allowed.values()))
    assert size_bounds == [(), (25,), (25,), (38,)]
