"""Which proposals are chosen, with their options, and how they are put around an optimiser, one around the other."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn, optim

from memopt.optimizers.bf16_parameters import BF16ParametersOptimizer, Rounding, use_bf16_parameters
from memopt.optimizers.low_bit_optimizer import LowBitOptimizer, check_adam
from memopt.optimizers.offload_optimizer import OffloadedOptimizer, Where, check_update
from memopt.optimizers.optimizer_in_backward import OptimizerInBackward, refuse_what_needs_all_gradients
from memopt.optimizers.wrapped_optimizer import check_inner


@dataclass(frozen=True)
class Proposals:
    """Which proposals are chosen, from the inside out; by default none."""

    bf16_parameters: Rounding | None = None
    low_bit_optimizer: bool = False
    offload_optimizer: Where | None = None
    optimizer_in_backward: bool = False
    state_dtype: torch.dtype = torch.float32
    """The dtype of the state with `bf16_parameters`: see `BF16ParametersOptimizer`."""

    @classmethod
    def named(cls, names: Collection[str]) -> Proposals:
        """The proposals that `allow` calls by `names`, with their usual options.

        Raises `ValueError` for a name that is none.
        """
        unknown = sorted(set(names) - _USUAL.keys())
        if unknown:
            raise ValueError(f"no proposal is named {unknown[0]!r}; there are {', '.join(_USUAL)}")
        return cls(**{name: _USUAL[name] for name in names})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the chosen proposals, from the inside out."""
        return tuple(name for name in _USUAL if getattr(self, name))

    def only(self, names: Collection[str]) -> Proposals:
        """These proposals with their options, reduced to `names`."""
        return replace(self, **{name: getattr(NONE, name) for name in _USUAL if name not in names})

    def check(self, optimizer: optim.Optimizer, **step: Any) -> None:
        """Raise `TypeError` or `ValueError` for an optimiser, or a training step, that these proposals do not fit.

        `step` holds the options of the training step that `OptimizerInBackward` takes.
        """
        if self.names:
            check_inner(optimizer, self.names[0])
        if self.low_bit_optimizer:
            check_adam(optimizer)
        if self.offload_optimizer:
            check_update(optimizer, self.offload_optimizer)
        if self.optimizer_in_backward:
            refuse_what_needs_all_gradients(**step)

    def wrap(self, optimizer: optim.Optimizer, **step: Any) -> optim.Optimizer:
        """The optimiser with all chosen proposals around it; its parameters must have their final dtypes already."""
        if self.bf16_parameters:
            optimizer = BF16ParametersOptimizer(optimizer, self.bf16_parameters, state_dtype=self.state_dtype)
        return self._around(optimizer, **step)

    def apply(self, model: nn.Module, optimizer: optim.Optimizer, **step: Any) -> optim.Optimizer:
        """Like `wrap`, but first turns the parameters of `model` to bfloat16, in place, where that is chosen.

        Raises as `check` does, and then changes nothing.
        """
        self.check(optimizer, **step)
        if self.bf16_parameters:
            optimizer = use_bf16_parameters(model, optimizer, self.bf16_parameters, state_dtype=self.state_dtype)
        return self._around(optimizer, **step)

    def _around(self, optimizer: optim.Optimizer, **step: Any) -> optim.Optimizer:
        if self.low_bit_optimizer:
            optimizer = LowBitOptimizer(optimizer)
        if self.offload_optimizer:
            optimizer = OffloadedOptimizer(optimizer, self.offload_optimizer)
        return OptimizerInBackward(optimizer, **step) if self.optimizer_in_backward else optimizer


NONE = Proposals()
# The option of a proposal of which only the name is given, from the inside out.
_USUAL: dict[str, Any] = {
    "bf16_parameters": "stochastic",
    "low_bit_optimizer": True,
    "offload_optimizer": "device",
    "optimizer_in_backward": True,
}
