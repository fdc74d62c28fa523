"""One training step, run and measured: what the end-to-end tests compare."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memopt
from memopt.account.account import distinct_bytes
from memopt.capture.inputs import tensors_in
from tests.families import loss_of


@dataclass(frozen=True)
class Step:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    peak_bytes: int
    """Parameters, buffers and inputs, and all that was allocated beside them."""


def own_bytes(model: nn.Module, batch: dict[str, Any]) -> int:
    return distinct_bytes([*model.parameters(), *model.buffers(), *tensors_in(((), batch))])


def train_step(model: nn.Module, batch: dict[str, Any], seed: int = 0) -> Step:
    """Forward and backward from cleared gradients, the output held until the end as most training loops do."""
    model.zero_grad()
    gc.collect()
    torch.manual_seed(seed)
    with memopt.measure_peak("cpu") as peak:
        output = model(**batch)
        loss_of(output).backward()
    return Step(
        loss_of(output).detach().clone(),
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        peak.allocated_bytes + own_bytes(model, batch),
    )


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers as they were once the block ends: running statistics, counters."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


def assert_equal(step: Step, plain: Step, tolerance: float = 0.0) -> None:
    """Loss, gradients and buffers equal bit by bit, or within `tolerance` of the largest value of each."""
    assert step.gradients.keys() == plain.gradients.keys()
    assert step.buffers.keys() == plain.buffers.keys()
    pairs = {"loss": (step.loss, plain.loss)}
    pairs |= {f"gradient of {n}": (step.gradients[n], plain.gradients[n]) for n in plain.gradients}
    pairs |= {f"buffer {n}": (step.buffers[n], plain.buffers[n]) for n in plain.buffers}
    for what, (ours, theirs) in pairs.items():
        if tolerance:
            error = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
            assert error <= tolerance, f"{what} differs by {error:.2e} of its largest value"
        else:
            assert torch.equal(ours, theirs), f"{what} differs"
