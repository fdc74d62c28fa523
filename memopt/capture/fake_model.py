"""A model whose parameters are, for the length of a block, fakes: planned without its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from memopt.torch_compat import FakeTensorMode, to_fake


@contextmanager
def fake_parameters(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Swap parameters and buffers for fakes on `device`, tied ones for one fake, and swap them back at the end."""
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    swapped: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        swapped.append((table, name, tensor))  # type: ignore[arg-type]
                        if tensor not in fakes:
                            fakes[tensor] = to_fake(mode, tensor, device)
        for table, name, tensor in swapped:
            table[name] = fakes[tensor]
        yield
    finally:
        for table, name, tensor in swapped:
            table[name] = tensor
