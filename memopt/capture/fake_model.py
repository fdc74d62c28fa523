"""Replaces a model's parameters and buffers by fake tensors temporarily, so that it can be planned without its
memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from memopt.compat.fakes import FakeTensorMode, to_fake
from memopt.training_state import Attributes, generator_states, set_generators

Fakes = Mapping[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Narrowed:
    """Has a model planned as if its fp32 parameters and inputs had another dtype."""

    dtype: torch.dtype
    kept: frozenset[int]
    """The `id`s of parameters that keep their dtype."""

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that a parameter or buffer is planned with."""
        narrows = isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float32 and id(tensor) not in self.kept
        return self.dtype if narrows else tensor.dtype


@contextmanager
def fake_parameters(
    model: nn.Module, mode: FakeTensorMode, device: torch.device, narrowed: Narrowed | None = None
) -> Iterator[Fakes]:
    """Replace parameters and buffers by fake tensors on `device` for the length of the block; yields real tensor →
    fake. A tensor used in several places gets one fake.

    At the end all attributes of all modules and the random generators are restored, including what the forward changed
    meanwhile: where a forward breaks into regions, its Python code runs once on fakes.
    """

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return to_fake(mode, tensor, device, narrowed.dtype_of(tensor) if narrowed else None)

    with replaced_parameters(model, fake) as fakes:
        yield fakes


@contextmanager
def replaced_parameters(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Fakes]:
    """Replace parameters and buffers by `make(tensor)` as `fake_parameters` does, which says what is restored."""
    home = next(model.parameters()).device
    generators = generator_states(home)
    made: dict[torch.Tensor, torch.Tensor] = {}
    attributes = Attributes(model)
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        if tensor not in made:
                            made[tensor] = make(tensor)
                        table[name] = made[tensor]  # type: ignore[assignment]
        yield made
    finally:
        attributes.restore()
        set_generators(generators, home)
