"""The optimiser that steps a model's parameters, where it is there already: in which order, and by which kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from memopt.account.optimizer_trial import OptimizerLike, parameters_of


@dataclass(frozen=True)
class LiveOptimizer:
    """What a step of an optimiser holds beside its class's defaults depends on this."""

    kind: type[Optimizer]
    order: tuple[int, ...]
    """The `id`s of its parameters, in the order of its groups: a loop over them frees the temporaries of one in the
    step of the next."""
    fused: bool
    """Whether all its groups are stepped by torch's fused kernels, which need no temporaries."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> LiveOptimizer:
        """Describe an optimiser, without holding it or its parameters."""
        order = tuple(map(id, parameters_of(optimizer)))
        return cls(type(optimizer), order, all(group.get("fused") is True for group in optimizer.param_groups))

    def like(self, optimizer: OptimizerLike) -> OptimizerLike:
        """The class `optimizer`, with fused kernels where this one uses them."""
        if not self.fused:
            return optimizer
        make: Any = self.kind
        return partial(make, fused=True)

    def in_order(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters in the order in which they are stepped; those that it does not step are last."""
        places = {parameter: place for place, parameter in enumerate(self.order)}
        return sorted(parameters, key=lambda parameter: places.get(id(parameter), len(places)))

    def departure(self, parameters: Iterable[torch.Tensor]) -> str:
        """In what it differs from one by its class's defaults that steps these parameters in their order; the same text
        in all processes, and empty where it does not differ."""
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        order = [numbers[parameter] for parameter in self.order if parameter in numbers]
        return f"{'fused ' if self.fused else ''}{order if order != sorted(order) else ''}"


def steps_any(optimizer: Optimizer, ids: set[int]) -> bool:
    """Whether an optimiser steps any of the parameters with these `id`s."""
    groups = getattr(optimizer, "param_groups", ())
    return any(id(parameter) in ids for group in groups for parameter in group["params"])


def live_optimizer_of(optimizer: Any, live: Sequence[LiveOptimizer]) -> LiveOptimizer | None:
    """The only one of the class that is planned for, a class or its name; None where there is none or several, or an
    optimiser with its own options is planned for."""
    name = optimizer.lower() if isinstance(optimizer, str) else None
    found = [one for one in live if one.kind is optimizer or one.kind.__name__.lower() == name]
    return found[0] if len(found) == 1 else None
