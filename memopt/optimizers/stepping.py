"""What stepping parameters within the backward takes, parameter by parameter, as far as plans need it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

Kind: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a parameter."""


@dataclass(frozen=True)
class Stepping:
    """The optimiser steps within the backward of a call that is one region."""

    temporaries: tuple[tuple[Kind, int], ...]
    """The most bytes that the step of a parameter of each kind makes and frees again."""
    left: frozenset[int] = frozenset()
    """Numbers of the inputs that are stepped at the backward's end, although they could be before."""

    @classmethod
    def of(cls, parameters: Iterable[tuple[torch.Tensor, torch.dtype, int]]) -> Stepping:
        """From parameters, the dtypes in which they are stepped, and the bytes that each takes."""
        most: dict[Kind, int] = {}
        for parameter, dtype, nbytes in parameters:
            kind = tuple(parameter.shape), parameter.stride(), dtype
            most[kind] = max(most.get(kind, 0), nbytes)
        return cls(tuple(most.items()))

    def leaving(self, left: Iterable[int]) -> Stepping:
        """With more inputs left to the end."""
        return replace(self, left=self.left | frozenset(left))

    def workspace_bytes(self, value: Any) -> int | None:
        """Of stepping a graph's input, given its fake; None for what is no parameter."""
        if not isinstance(value, torch.Tensor):
            return None
        return dict(self.temporaries).get((tuple(value.shape), value.stride(), value.dtype))
