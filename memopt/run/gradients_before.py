"""The gradients of a model before a backward that may fail."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from memopt.compat.modules import modules_of, parameters_in


@dataclass(frozen=True, eq=False)
class GradientsBefore:
    """The gradients of a model before a backward, which are not copied: a backward adds to them in place."""

    parameters: tuple[tuple[nn.Parameter, weakref.ref[torch.Tensor] | None, int], ...]
    """Each parameter with its gradient and that gradient's version."""

    @classmethod
    def of(cls, model: nn.Module) -> GradientsBefore:
        """The present gradients."""
        found = []
        for parameter in parameters_in(modules_of(model)):
            gradient = parameter.grad
            found.append((parameter, None if gradient is None else weakref.ref(gradient), _version(gradient)))
        return cls(tuple(found))

    def undo(self) -> bool:
        """Drop the gradients that appeared since; returns False where those that were there have changed."""
        for parameter, before, _ in self.parameters:
            if before is None:
                parameter.grad = None
        return all(
            before is None or (before() is parameter.grad and _version(parameter.grad) == version)
            for parameter, before, version in self.parameters
        )


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version
