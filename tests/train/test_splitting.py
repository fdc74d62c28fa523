"""Batches that fit only in pieces."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt import BudgetError, TrainStep
from memopt.errors import GIB
from memopt.meter import measure_peak
from tests.smallest import smallest_gb
from tests.train.pieces import gpt2_without_dropout, normals, seeded, uneven_text, weights

BATCH = uneven_text(8, 32)
OPTIONS: dict[str, Any] = {
    "precision": "fp32",
    "optimizer": torch.optim.SGD,
    "allow": frozenset({"recompute", "microbatch"}),
}


def halves(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: each[: len(each) // 2] for name, each in batch.items()}


@cache
def between() -> float:
    """A budget that half of the batch fits, gradients held, and the whole does not."""
    whole = smallest_gb(gpt2_without_dropout(), BATCH, **OPTIONS)
    half = smallest_gb(gpt2_without_dropout(), halves(BATCH), **OPTIONS)
    gradients = sum(p.nbytes for p in gpt2_without_dropout().parameters()) / GIB
    assert half + gradients < whole, "this batch is too small to tell"
    return (half + gradients + whole) / 2


@pytest.mark.slow
def test_it_is_split_and_the_step_is_that_of_the_whole() -> None:
    plain, ours = gpt2_without_dropout(), gpt2_without_dropout()
    expected = TrainStep(plain, torch.optim.SGD(plain.parameters(), 0.1))(BATCH)
    memopt.optimize(ours, between(), **OPTIONS)
    step = TrainStep(ours, torch.optim.SGD(ours.parameters(), 0.1))
    with pytest.warns(UserWarning, match="8 samples does not fit .* is trained in 2 microbatches"):
        found = step(BATCH)
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    for one, other in zip(weights(ours), weights(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_second_step_needs_no_planning_and_keeps_to_the_budget() -> None:
    model, budget = gpt2_without_dropout(), between()
    memopt.optimize(model, budget, **OPTIONS)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match="microbatches"):
        step(BATCH)
    held = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    with measure_peak("cpu") as peak:
        step(BATCH)
    assert peak.allocated_bytes + held + sum(tensor.nbytes for tensor in BATCH.values()) <= budget * GIB


@pytest.mark.slow
@pytest.mark.parametrize(("allow", "microbatches"), [({"recompute"}, None), ({"recompute", "microbatch"}, 1)])
def test_not_unless_it_is_allowed(allow: set[str], microbatches: int | None) -> None:
    model = gpt2_without_dropout()
    memopt.optimize(model, between(), **{**OPTIONS, "allow": allow})
    before = weights(model)
    with pytest.raises(BudgetError):
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), microbatches=microbatches)(BATCH)
    assert all(map(torch.equal, weights(model), before))


@pytest.mark.slow
def test_not_even_one_sample_fits() -> None:
    model = gpt2_without_dropout()
    memopt.optimize(model, 1e-5, **OPTIONS)
    with pytest.raises(BudgetError) as error:
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))(BATCH)
    assert error.value.smallest_gb < smallest_gb(gpt2_without_dropout(), BATCH, **OPTIONS)


class Normalised(nn.Module):
    """Two convolutions with batch statistics between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.last(self.norm(self.first(images)).relu()).relu()
        return nn.functional.cross_entropy(hidden.mean((-1, -2)), labels)


def test_batch_statistics_are_not_taken_apart() -> None:
    def batch(samples: int) -> dict[str, Any]:
        return {"images": normals(samples, 3, 32, 32), "labels": torch.arange(samples)}

    model = seeded(Normalised)().train()
    budget = 0.95 * smallest_gb(model, batch(8), **OPTIONS)
    memopt.optimize(model, budget, **OPTIONS)
    with pytest.raises(BudgetError, match=r"normalisation would see each by itself: give TrainStep microbatches="):
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1))(batch(8))
