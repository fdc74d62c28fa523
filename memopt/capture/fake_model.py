"""A model whose parameters are, for the length of a block, fakes: planned without its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.compat.fakes import FakeTensorMode, to_fake

Fakes = Mapping[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Narrowed:
    """Has a model planned as if its fp32 parameters, and its fp32 inputs, were of another dtype."""

    dtype: torch.dtype
    kept: frozenset[int]
    """The `id`s of parameters that stay as they are."""

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        turned = isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float32 and id(tensor) not in self.kept
        return self.dtype if turned else tensor.dtype


@contextmanager
def fake_parameters(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, narrowed: Narrowed | None = None
) -> Iterator[Fakes]:
    """Swap parameters and buffers for fakes on `device`, tied ones for one fake; yields which fake stands for which.

    At the end every module has its attributes as before, also those that the forward has set meanwhile: where a forward
    breaks into regions, its Python runs once on fakes.
    """
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        before += [(table, dict(table)) for table in (vars(module), module._parameters, module._buffers)]
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        if tensor not in fakes:
                            dtype = narrowed.dtype_of(tensor) if narrowed else None
                            fakes[tensor] = to_fake(mode, tensor, device, dtype)
                        table[name] = fakes[tensor]  # type: ignore[assignment]
        yield fakes
    finally:
        for table, values in before:
            table.clear()
            table.update(values)
