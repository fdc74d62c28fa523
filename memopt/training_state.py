"""What a forward and backward change, kept so that another can start from the same state."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingState:
    """Gradients, buffers and random states of a moment. Parameters are not kept: only an optimiser changes them."""

    model: nn.Module
    device: torch.device
    gradients: tuple[tuple[nn.Parameter, torch.Tensor | None], ...]
    buffers: tuple[tuple[nn.Module, dict[str, torch.Tensor | None], Tensors], ...]
    """For each module its table of buffers, and copies of their values in the host's memory."""
    generators: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> TrainingState:
        """The state of `model` now; its buffers are copied, its gradients only held."""
        device = next(model.parameters()).device
        tables = ((module, dict(module._buffers)) for module in model.modules())
        return cls(
            model,
            device,
            tuple((parameter, parameter.grad) for parameter in model.parameters()),
            tuple(
                (module, table, {name: on_host(each) for name, each in table.items() if each is not None})
                for module, table in tables
            ),
            generator_states(device),
        )

    def restore(self) -> None:
        """Set buffers and generators back to this state, and take all gradients away."""
        for parameter, _ in self.gradients:
            parameter.grad = None
        self.undo_forward()

    def undo_forward(self) -> None:
        """Set buffers and generators back to this state."""
        for module, table, values in self.buffers:
            module._buffers.clear()
            module._buffers.update(table)
            for name, value in values.items():
                buffer = table[name]
                if buffer is not None and not torch.equal(buffer.cpu(), value):
                    buffer.detach().copy_(value)
        set_generators(self.generators, self.device)

    def restore_gradients(self) -> None:
        """Give the parameters the gradients of this state, the very tensors."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def kept(self) -> list[torch.Tensor]:
        """The tensors that this keeps alive and a step from here does not."""
        gradients = [gradient for _, gradient in self.gradients if gradient is not None]
        return gradients + [value for *_, values in self.buffers for value in values.values()]

    def gradients_now(self) -> Tensors:
        """The model's gradients as they are now, by the names of their parameters; not copied if on the CPU."""
        named = self.model.named_parameters()
        return {name: parameter.grad.detach().cpu() for name, parameter in named if parameter.grad is not None}

    def buffers_now(self) -> Tensors:
        """Copies of the model's buffers as they are now, by name."""
        return {name: on_host(buffer) for name, buffer in self.model.named_buffers()}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """The states of Python's, numpy's and torch's generators, for `set_generators`."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_generators(states: tuple[Any, ...], device: torch.device) -> None:
    """Set the generators back to what `generator_states` gave."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
