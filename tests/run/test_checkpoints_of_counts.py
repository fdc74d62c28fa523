"""Counts of steps run the model beside the call that the loop makes, and leave nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.run.checkpoints import sums_agree, sums_of

MB = 2**20


def test_a_checkpoint_around_a_call_does_not_get_what_a_count_saves() -> None:
    results = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8))
        if planned:
            memopt.optimize(model, 1, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
        for rows in (40, 30):
            loss = checkpoint(model, torch.ones(rows, 8, requires_grad=True), use_reentrant=False).square().mean()
            loss.backward()
            results.append([loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)])
    assert all(torch.equal(*pair) for one in range(2) for pair in zip(results[one], results[2 + one], strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:
        hidden = self.a(x).tanh()
        collected.append(hidden)  # as a router's logits, for a loss of their own
        torch._dynamo.graph_break()
        return x + self.b(hidden)


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        collected: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, collected=collected)
        return x.square().mean() + sum(one.square().mean() for one in collected)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(torch.arange(len(x)))


class AddsInPlace(Collects):
    """Adds to the input of a module what the module returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions = nn.Linear(64, 64), Positions()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x += self.positions(x)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Collects, AddsInPlace])
def test_a_model_that_was_refused_is_freed(kind: type[nn.Module]) -> None:
    def refused() -> list[weakref.ref[object]]:
        model = kind()
        memopt.optimize(model, 1.5 * MB / 2**30, optimizer=None, precision="fp32", allow={"recompute"})
        with pytest.raises(memopt.BudgetError):
            model(torch.randn(512, 64))
        return [weakref.ref(one) for one in (model, *model.parameters())]

    left = refused()
    gc.collect()
    assert [one() for one in left] == [None] * len(left)


def test_the_check_of_a_second_run_holds_next_to_nothing() -> None:
    outputs = torch.randn(512, 512).t()
    with memopt.measure_peak() as peak:
        sums = sums_of(outputs)
    assert peak.allocated_bytes < outputs.nbytes // 16
    assert sums_agree(sums, sums_of(outputs))
    assert not sums_agree(sums, sums_of(outputs + 0.01))


def test_the_check_of_a_second_run_sees_small_changes_of_16_bit_outputs() -> None:
    outputs = torch.ones(512, 512, dtype=torch.bfloat16)
    changed = outputs.clone()
    changed[:2] *= 1.0078125
    assert not sums_agree(sums_of(outputs), sums_of(changed))  # a sum in bfloat16 is the same for both


def test_the_check_of_a_second_run_sees_changes_of_fp16_outputs_whose_magnitudes_add_up_to_more_than_fp16_holds() -> (
    None
):
    outputs = torch.randn(512, 512).half()
    assert not sums_agree(sums_of(outputs), sums_of(3 * outputs))


def test_the_check_of_a_second_run_takes_nan_for_nan() -> None:
    """As in a step that a gradient scaler skips."""
    outputs = torch.randn(512, 512)
    outputs[0] = torch.nan
    assert sums_agree(sums_of(outputs), sums_of(outputs.clone()))
    outputs[1], outputs[2] = torch.inf, -torch.inf
    assert sums_agree(sums_of(outputs), sums_of(outputs.clone()))
