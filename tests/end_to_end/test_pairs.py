"""Levers compose: each pair trains within the smallest budget that planning with both names. The pairs take turns on
several models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from functools import cache
from itertools import combinations, cycle
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from examples.models.step import own_bytes
from memopt import TrainStep
from memopt.errors import GIB
from memopt.levers import DEFAULT_LEVERS, OPTIMIZER_LEVERS
from memopt.meter import measure_peak
from memopt.microbatch import samples_of, split
from tests.end_to_end.test_levers import MODELS, batch, make
from tests.smallest import smallest_gb

EIGHT_BITS = {"fp8", "mxfp8", "fp8_activations"}
# On a CPU there is no host to move anything to.
LEVERS = sorted((DEFAULT_LEVERS | OPTIMIZER_LEVERS | EIGHT_BITS) - {"offload_optimizer", "offload_activations"})
WITH_DROPOUT = ("small", "gpt2", "opt")
# TrainStep has microbatches, and no optimiser in the backward; and a layer has one kind of scale.
APART = ({"optimizer_in_backward", "microbatch"}, {"fp8", "mxfp8"})
PAIRS = [pair for pair in combinations(LEVERS, 2) if set(pair) not in APART]
CASES = [
    pytest.param(name, pair, id=f"{name}-{' and '.join(pair)}")
    for name, pair in zip(cycle(MODELS), PAIRS, strict=False)
]


def in_16_bits(pair: Collection[str]) -> bool:
    return bool({"bf16_parameters", *EIGHT_BITS}.intersection(pair))


def options(pair: Collection[str]) -> dict[str, Any]:
    precision = "bf16" if in_16_bits(pair) else "fp32"
    return {"allow": set(pair), "precision": precision, "optimizer": torch.optim.AdamW}


@cache
def plain_loss(name: str) -> float:
    return float(make(name)(**batch()).loss.detach())


def example(pair: Collection[str]) -> dict[str, Any]:
    """Return the batch to plan: one sample where TrainStep may split the batch down to that."""
    return split(batch(), samples_of(batch()))[0] if "microbatch" in pair else batch()


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], float]:
    step = TrainStep(model, optimizer)
    return lambda batch: float(step(batch).loss)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], float]:
    def step(batch: Any) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pair"), CASES)
def test_pairs(name: str, pair: tuple[str, str]) -> None:
    least = smallest_gb(make(name), example(pair), gradients_held="microbatch" in pair, **options(pair))
    model, budget_gb = make(name), 1.005 * least
    memopt.optimize(model, budget_gb, example_inputs=example(pair), **options(pair))
    optimizer = memopt.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), 1e-3))
    step = loop(model, optimizer) if "optimizer_in_backward" in pair else trainer(model, optimizer)
    inputs = batch()
    held = own_bytes(model, inputs)
    with warnings.catch_warnings(), measure_peak("cpu") as peak:
        warnings.simplefilter("ignore")  # of microbatches
        losses = [step(inputs) for _ in range(3)]
    assert peak.allocated_bytes + held <= budget_gb * GIB
    # Dropout draws otherwise for microbatches.
    rounded = in_16_bits(pair) or ("microbatch" in pair and name in WITH_DROPOUT)
    assert losses[0] == pytest.approx(plain_loss(name), rel=1e-2 if rounded else 1e-5)
    assert losses[-1] < losses[0]
