"""The peak predicted for a step in several regions, beside the peak that it has."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.account.account import distinct_bytes
from memopt.errors import GIB
from tests.end_to_end.test_values_in_python import EXACT, seed, wav2vec2


@pytest.mark.slow
@pytest.mark.parametrize("roomy", [True, False])
def test_what_regions_pass_on_counts_while_it_is_held(roomy: bool) -> None:
    seed(0)
    model, batch = wav2vec2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {**EXACT, "optimizer": torch.optim.AdamW}
    smallest = memopt.plan(wav2vec2()[0], 1, batch, **options).smallest_gb()
    memopt.optimize(model, 1 if roomy else smallest * 1.02, example_inputs=batch, **options)
    for number in range(3):
        seed(number)
        state = [value for one in optimizer.state.values() for value in one.values()]
        held = distinct_bytes([*model.parameters(), *model.buffers(), *batch.values(), *state])
        gc.collect()
        with memopt.measure_peak("cpu") as peak:
            loss = model(**batch).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    plan = memopt.plan_of(model)
    assert len(plan.regions) > 4
    predicted = plan.predicted_peak_gb * GIB - plan.account.reserve
    assert peak.allocated_bytes + held <= predicted + plan.account.reserve
    assert not roomy or predicted <= 1.05 * (peak.allocated_bytes + held)


@torch.compiler.disable
def factors(like: torch.Tensor) -> torch.Tensor:
    """What code between regions makes, without a gradient."""
    return torch.rand(like.shape[0], 64)


class Scaled(nn.Module):
    """A layer whose result is multiplied by what code between regions makes, so that the backward reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * factors(x)  # what is saved of it is small, and the factors


class Loss(nn.Module):
    """Four such layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_what_is_made_between_regions_and_saved_by_one_counts_until_its_backward() -> None:
    seed(0)
    model, x = Loss().train(), torch.randn(1024, 64)
    memopt.optimize(model, 1, example_inputs=(x,), **{**EXACT, "optimizer": None})
    held = distinct_bytes([*model.parameters(), x])
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        with memopt.measure_peak("cpu") as peak:
            model(x).backward()
    plan = memopt.plan_of(model)
    assert len(plan.regions) > 3
    predicted = plan.predicted_peak_gb * GIB - plan.account.reserve
    assert peak.allocated_bytes + held <= predicted <= 1.2 * (peak.allocated_bytes + held)
