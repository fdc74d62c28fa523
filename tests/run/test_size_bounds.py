"""The largest sizes that calls are planned for."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

import memopt
from memopt.planning.stages import Recorded
from memopt.planning.terms import Situation
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
        priced, *_ = Recorded(calls.planner, captured, call, Situation()).candidates()
        found.append(priced.account.inputs)
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


class Recurrent(nn.Module):
    """Has a GRU over every second frame, whose steps are unrolled when it is traced: a condition that Dynamo does not
    know."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru = nn.Conv1d(8, 16, 3, stride=2, padding=1), nn.GRU(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.gru(self.conv(x).transpose(1, 2))[0]
        return y.square().mean()


@pytest.mark.slow
def test_a_size_that_tracing_unrolls_is_planned_for_as_it_is() -> None:
    lengths, trained = (11, 13, 9, 13), []
    for optimized in (False, True):
        torch.manual_seed(0)
        model = Recurrent()
        if optimized:
            memopt.optimize(model, 1, optimizer=None, precision="fp32", allow={"recompute"})
        for length in lengths:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*to be a constant at")
                model(torch.ones(6, 8, length)).backward()
        trained.append([parameter.grad for parameter in model.parameters()])
    for ours, plain in zip(*reversed(trained), strict=True):
        assert (ours - plain).abs().max() <= 1e-6 * plain.abs().max()  # rounded otherwise, as the plan's note says
