"""The inputs of a forward that waits for its backward, for a second run; the caller's tensors are not kept alive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef


@dataclass(frozen=True, eq=False)
class WeakInputs:
    """The inputs with which a region ran. Tensors that only the caller holds are referenced weakly, so that the caller
    can free them. Versions show whether a tensor was written to since."""

    references: Sequence[Any]
    """The inputs; weak references for tensors that only the caller holds."""
    versions: Sequence[int]
    """The inputs' `_version`s; 0 for values that are not tensors, and for tensors made in inference mode."""
    places: Mapping[int, object]
    """For each tensor that only the caller holds, by its number: its address, shape, strides and dtype (`_place`)."""

    @classmethod
    def of(cls, inputs: Sequence[Any], given: Iterable[torch.Tensor]) -> WeakInputs:
        """The `inputs` of a region that runs now. `given` are the tensors of the call, which the caller holds; the
        other inputs are the model's."""
        ids = set(map(id, given))
        own = {number: one for number, one in enumerate(inputs) if id(one) in ids and type(one) is not nn.Parameter}
        references = list(inputs)
        for number, one in own.items():
            references[number] = TensorWeakRef(one)
        return cls(references, list(map(_version, inputs)), {number: _place(one) for number, one in own.items()})

    def present(self, saved: Callable[[], Iterable[torch.Tensor]] = tuple) -> list[Any]:
        """The inputs in order. A tensor that the caller has freed is replaced by one of those that the forward's
        autograd nodes have saved, which `saved` returns: if address, shape, strides and dtype are equal, it is the same
        tensor, since the caller held it until all of them were saved. None if there is no such tensor."""
        found = [one() if isinstance(one, TensorWeakRef) else one for one in self.references]
        if self.are_gone(found):
            same = {_place(one): one.detach() for one in saved()}
            for number, place in self.places.items():
                if found[number] is None and place is not None:
                    found[number] = same.get(place)
        return found

    def are_gone(self, present: Sequence[Any]) -> bool:
        """Whether any of the caller's tensors was freed: it is None in `present`, the result of `present()`."""
        return any(present[number] is None for number in self.places)

    def have_changed(self, present: Sequence[Any], but: Collection[int]) -> bool:
        """Whether any tensor in `present`, the result of `present()`, has been written to since the region ran, except
        the inputs with the numbers `but`."""
        return any(number not in but and _version(one) != self.versions[number] for number, one in enumerate(present))


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _place(tensor: torch.Tensor) -> object:
    """The address, shape, strides and dtype of a plain tensor; None for any other."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if plain else None
