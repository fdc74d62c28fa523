"""The inputs of a forward that waits for its backward, for a second run of it, which does not keep them alive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef


@dataclass(frozen=True, eq=False)
class WeakInputs:
    """The inputs of a region, as they were when it ran."""

    references: tuple[Any, ...]
    """Numbers and parameters, and weak references to other tensors."""
    versions: tuple[int, ...]
    """The versions of these tensors."""
    places: tuple[Any, ...]
    """The memory of each plain tensor, and how it lies there; None for all else."""

    @classmethod
    def of(cls, inputs: Sequence[Any]) -> WeakInputs:
        return cls(
            tuple([TensorWeakRef(one) if _may_go(one) else one for one in inputs]),
            tuple([one._version if isinstance(one, torch.Tensor) else 0 for one in inputs]),
            tuple([_place(one) if _may_go(one) else None for one in inputs]),
        )

    def present(self, saved: Callable[[], Iterable[torch.Tensor]] = tuple) -> list[Any]:
        """The inputs, None for those that are gone. For a tensor that its caller has freed this is the one among
        `saved`, what the forward's autograd nodes have saved, which lies where it lay: it was there until all that the
        forward saves was made, so that no other tensor can."""
        found = [one() if isinstance(one, TensorWeakRef) else one for one in self.references]
        if any(one is None and place is not None for one, place in zip(found, self.places, strict=True)):
            same = {_place(one): one.detach() for one in saved()}
            found = [same.get(place) if one is None else one for one, place in zip(found, self.places, strict=True)]
        return found

    def are_gone(self, present: Sequence[Any]) -> bool:
        """Whether any of the tensors is gone."""
        tensors = (isinstance(one, TensorWeakRef) for one in self.references)
        return any(is_tensor and one is None for one, is_tensor in zip(present, tensors, strict=True))

    def have_changed(self, present: Sequence[Any], but: Collection[int]) -> bool:
        """Whether any of the tensors has been written to since, apart from those of the numbers `but`."""
        return any(
            isinstance(one, torch.Tensor) and number not in but and one._version != self.versions[number]
            for number, one in enumerate(present)
        )


def _may_go(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value) is not nn.Parameter


def _place(tensor: torch.Tensor) -> object:
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if plain else None
