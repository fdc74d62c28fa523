"""Runs the same piece of training on a plain and an optimised model, measures both, and compares the results."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memopt
from examples.models.families import loss_of
from memopt.account.account import distinct_bytes

GIB = 1024**3
Piece = Callable[[nn.Module], Any]
"""Runs forwards and backwards of a model in any order, and returns the values to compare."""


@dataclass(frozen=True)
class Trained:
    """Returned values, gradients, buffers and peak of a piece of training."""

    returned: Any
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    peak_bytes: int
    """The most bytes held at once: parameters, buffers, gradients, inputs, and everything allocated beside them."""


def call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return loss_of(call(model, batch))


def step(model: nn.Module, batch: Any) -> Tensor:
    """Run one forward and backward; return the loss."""
    value = loss(model, batch)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def run(model: nn.Module, piece: Piece, batch: Any) -> Trained:
    """Run a piece of training and measure it. Of the inputs only `batch`, the largest, is counted in the peak."""
    gc.collect()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    own = distinct_bytes([*model.parameters(), *model.buffers(), *gradients, *inputs])
    torch.manual_seed(0)
    with memopt.measure_peak("cpu") as peak:
        returned = piece(model)
    return Trained(
        returned,
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        own + peak.allocated_bytes,
    )


def assert_same(trained: Trained, plain: Trained) -> None:
    """Assert that returned values, gradients and buffers are the same bits."""
    for name, gradient in plain.gradients.items():
        assert same(trained.gradients[name], gradient), f"the gradient of {name} differs"
    for name, buffer in plain.buffers.items():
        assert same(trained.buffers[name], buffer), f"the buffer {name} differs"
    ours, theirs = tree_leaves(trained.returned), tree_leaves(plain.returned)
    assert len(ours) == len(theirs)
    assert all(map(same, ours, theirs)), f"what the calls return differs: {ours} and {theirs}"


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and torch.equal(a, b)


def plan(model: nn.Module, batch: Any, **options: Any) -> memopt.Plan:
    """Return the plan of a step without an optimiser, within a budget of 1 GB that every test model fits."""
    return memopt.plan(model, 1.0, batch, **{"optimizer": None, "precision": "fp32", "allow": {"recompute"}, **options})


def tight(model: nn.Module, batch: Any, **options: Any) -> float:
    """Return a budget in GB half-way between the smallest that works and the plain step's peak."""
    roomy = plan(model, batch, **options)
    smallest = roomy.smallest_gb()
    assert smallest < 0.95 * roomy.plain_peak_gb, "the test needs a model that recomputation helps"
    return (smallest + roomy.plain_peak_gb) / 2


def check(model: nn.Module, piece: Piece, budget_gb: float, batch: Any, **options: Any) -> Trained:
    """Optimise `model`; assert that a piece of training is bitwise the plain model's and within the budget."""
    plain = run(copy.deepcopy(model), piece, batch)
    memopt.optimize(model, budget_gb, **{"optimizer": None, "precision": "fp32", "allow": {"recompute"}, **options})
    trained = run(model, piece, batch)
    assert_same(trained, plain)
    assert trained.peak_bytes <= budget_gb * GIB, f"{trained.peak_bytes} bytes exceed {budget_gb * GIB:.0f}"
    return trained
