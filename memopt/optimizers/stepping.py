"""The bytes that stepping parameters within the backward takes, as plans need them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

Kind: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a parameter; parameters of the same kind cost the same."""


@dataclass(frozen=True)
class Stepping:
    """How the optimiser steps within the backward of a call that is one region."""

    temporaries: tuple[tuple[Kind, int], ...]
    """For each kind of parameter the most bytes alive at once that its step makes and frees."""
    left: frozenset[int] = frozenset()
    """Numbers of the inputs that are stepped at the backward's end, although an earlier step is possible."""

    @classmethod
    def of(cls, parameters: Iterable[tuple[torch.Tensor, torch.dtype, int]]) -> Stepping:
        """From parameters, the dtypes in which they are stepped, and the bytes of each step's temporaries."""
        most: dict[Kind, int] = {}
        for parameter, dtype, nbytes in parameters:
            kind = tuple(parameter.shape), parameter.stride(), dtype
            most[kind] = max(most.get(kind, 0), nbytes)
        return cls(tuple(most.items()))

    def leaving(self, left: Iterable[int]) -> Stepping:
        """The same with these inputs left to the backward's end as well."""
        return replace(self, left=self.left | frozenset(left))

    def workspace_bytes(self, value: Any) -> int | None:
        """Bytes of temporaries of stepping a graph's input, given its fake tensor; None where it is no parameter."""
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            return None
        return dict(self.temporaries).get((tuple(value.shape), value.stride(), value.dtype))
