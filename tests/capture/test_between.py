"""Bytes of eager code between regions, counted on fakes; what regions make is left out, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.captured_call import CapturedCall, EagerCodeBytes, RegionRun
from memopt.capture.dry_run import Between, stand_in
from memopt.capture.joint import eager_of_runs
from memopt.compat.fakes import FakeTensorMode
from memopt.device.workspace_rules import SCALARS


def test_eager_code_counts_and_planned_code_does_not() -> None:
    between = Between()
    with FakeTensorMode(), between:
        x = torch.zeros(100)
        with between.planned():
            made = x * 2
        assert between.live_bytes == x.nbytes
        later = made + 1
        assert between.live_bytes == x.nbytes + later.nbytes
        again = made.view(10, 10)
        assert between.live_bytes == x.nbytes + later.nbytes, "the region's result stays the region's"
        del again
    assert 800 <= between.peak_bytes <= 800 + SCALARS


class Squares(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * x * x,)


def test_a_region_runs_as_one_function_whose_memory_is_not_counted() -> None:
    region, between = fx.symbolic_trace(Squares()), Between()
    with FakeTensorMode():
        leaf = torch.ones(100, requires_grad=True)
        with between:
            x = leaf * 2
            (y,) = stand_in(region, region.forward, between, between.begin_run(), (x,))
            before = between.peak_bytes
            assert before == between.live_bytes == x.nbytes
            y.sum().backward()
    assert leaf.grad is not None
    assert between.peak_bytes >= before


def test_kernels_of_eager_code_count_by_what_they_may_hold_whatever_their_values() -> None:
    between = Between()
    small, large = torch.zeros(32, 32), torch.full((32, 32), 8.0)
    with between:
        torch.linalg.matrix_exp(small)  # its kernel takes memory by the norm of its values
    least = between.peak_bytes
    between = Between()
    with between:
        torch.linalg.matrix_exp(large)
    assert least == between.peak_bytes > 5 * large.nbytes
    between = Between()
    with between, between.planned():
        torch.linalg.matrix_exp(large)
    assert between.peak_bytes == 0


def test_bytes_around_runs_without_a_joint_graph_count_at_the_ends_of_the_step() -> None:
    regions: list[Any] = [SimpleNamespace() for _ in range(3)]
    eager = [EagerCodeBytes(1, 2, 30, 4), EagerCodeBytes(5, 6, 7, 8), EagerCodeBytes(90, 10, 11, 12)]
    runs = [RegionRun(one, {}, eager=found) for one, found in zip(regions, eager, strict=True)]
    joint: Any = SimpleNamespace(trace=SimpleNamespace(region=regions[1]))
    call = CapturedCall(tuple(runs), ending=EagerCodeBytes(14, 13, 15))
    assert eager_of_runs([joint], call) == (EagerCodeBytes(5, 6, 12, 8), EagerCodeBytes(30, 13, 90))
