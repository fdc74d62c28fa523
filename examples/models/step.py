"""One training step, run and measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from examples.models.families import loss_of


@dataclass(frozen=True)
class Step:
    """What one forward and backward left behind, and the most that it held."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    peak_bytes: int
    """Bytes of parameters, buffers and inputs, and of all that was allocated beside them."""


def own_bytes(model: nn.Module, batch: dict[str, Any]) -> int:
    """Return the bytes of parameters, buffers and inputs; tensors that share a storage count once."""
    inputs = [value for value in batch.values() if isinstance(value, Tensor)]
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers(), *inputs)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train_step(model: nn.Module, batch: dict[str, Any], seed: int = 0) -> Step:
    """Run forward and backward from cleared gradients, and hold the output until the end, as most training loops do."""
    model.zero_grad()
    gc.collect()
    torch.manual_seed(seed)
    with memopt.measure_peak("cpu") as peak:
        output = model(**batch)
        loss_of(output).backward()  # type: ignore[no-untyped-call]
    return Step(
        loss_of(output).detach().clone(),
        {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        peak.allocated_bytes + own_bytes(model, batch),
    )


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Put buffers (running statistics, counters) back as they were once the block ends."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
