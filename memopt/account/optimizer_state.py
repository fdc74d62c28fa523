"""The tensors that an optimiser keeps between steps, and copies of its state to restore."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memopt.compat.host import HOST
from memopt.compat.operators import tree_leaves, tree_map


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors in the optimiser's state, at any depth."""
    return (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class OptimizerState:
    """A copy of an optimiser's parameters, state and options, with the values in the host's memory."""

    optimizer: torch.optim.Optimizer
    tensors: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    state: dict[Any, Any]
    groups: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Copy everything that a step of `optimizer` may write to."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        written = {id(tensor): tensor for tensor in [*parameters, *state_tensors(optimizer)]}
        return cls(
            optimizer,
            tuple((tensor, tensor.detach().to(HOST, copy=True)) for tensor in written.values()),
            {key: _same_tensors(value) for key, value in optimizer.state.items()},
            tuple(dict(group) for group in optimizer.param_groups),
        )

    def restore(self) -> None:
        """Set the optimiser back to this state, in the same tensor objects."""
        with torch.no_grad():
            for tensor, value in self.tensors:
                tensor.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update({key: _same_tensors(value) for key, value in self.state.items()})
        for group, values in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.clear()
            group.update(values)


def _same_tensors(value: Any) -> Any:
    """New containers around the same tensors."""
    return tree_map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.copy(leaf), value)
