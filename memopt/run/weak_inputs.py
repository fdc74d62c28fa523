"""The inputs of a forward that waits for its backward, for a second run of it, which does not keep them alive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef


@dataclass(frozen=True, eq=False)
class WeakInputs:
    """The inputs with which a region ran. Tensors that only the caller holds are kept as weak references, so that the
    caller can free them; versions tell whether a tensor was written to since."""

    references: Sequence[Any]
    """The inputs; of tensors that only the caller holds, weak references."""
    versions: Sequence[int]
    """The versions of the tensors."""
    places: Mapping[int, object]
    """By the numbers of plain tensors that only the caller holds: where each lies in memory."""

    @classmethod
    def of(cls, inputs: Sequence[Any], given: Iterable[torch.Tensor]) -> WeakInputs:
        """The `inputs` of a region that runs now. `given` are the tensors of the call, which the caller holds; the
        other inputs are the model's."""
        ids = set(map(id, given))
        own = {number: one for number, one in enumerate(inputs) if id(one) in ids and type(one) is not nn.Parameter}
        references = list(inputs)
        for number, one in own.items():
            references[number] = TensorWeakRef(one)
        versions = [one._version if isinstance(one, torch.Tensor) else 0 for one in inputs]
        return cls(references, versions, {number: _place(one) for number, one in own.items()})

    def present(self, saved: Callable[[], Iterable[torch.Tensor]] = tuple) -> list[Any]:
        """The inputs in order. A tensor that the caller has freed is taken from those that the forward's autograd nodes
        have saved, which `saved` returns: the one with the same address, shape, strides and dtype is the same tensor,
        since the caller held it until all of them were saved. None where there is no such one."""
        found = [one() if isinstance(one, TensorWeakRef) else one for one in self.references]
        if self.are_gone(found):
            same = {_place(one): one.detach() for one in saved()}
            for number, place in self.places.items():
                if found[number] is None and place is not None:
                    found[number] = same.get(place)
        return found

    def are_gone(self, present: Sequence[Any]) -> bool:
        """Whether any tensor of the caller is None in `present`, which `present()` returned: it was freed."""
        return any(present[number] is None for number in self.places)

    def have_changed(self, present: Sequence[Any], but: Collection[int]) -> bool:
        """Whether any tensor in `present`, which `present()` returned, has been written to since the region ran, except
        the inputs with the numbers `but`."""
        return any(
            isinstance(one, torch.Tensor) and number not in but and one._version != self.versions[number]
            for number, one in enumerate(present)
        )


def _place(tensor: torch.Tensor) -> object:
    """The address, shape, strides and dtype of a plain tensor; None for any other."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if plain else None
