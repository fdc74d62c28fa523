"""The largest sizes of the inputs with which a call in several regions was captured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memopt.capture.data_sizes import MARGIN
from memopt.capture.dynamic_shapes import with_eager_bytes
from memopt.capture.inputs import Call, tensors_in
from memopt.capture.region import CapturedCall, Sizes
from memopt.compat.storages import storage_key

Shapes = tuple[Sizes, ...]


@dataclass(frozen=True)
class LargestSizes:
    """The sizes of inputs up to which the bytes between regions are known, from captures and with a margin where sizes
    have grown."""

    shapes: Shapes

    @classmethod
    def of(cls, call: Call) -> LargestSizes:
        """The sizes of one call."""
        return cls(tuple(tuple(tensor.shape) for tensor in tensors_in(call)))

    def cover(self, call: Call) -> bool:
        """Whether no input of a call is larger."""
        return all(size <= most for size, most in _pairs(LargestSizes.of(call).shapes, self.shapes))

    def covering(self, call: Call) -> LargestSizes:
        """These sizes, and a margin above those of a call where it has larger ones."""
        shapes = zip(self.shapes, LargestSizes.of(call).shapes, strict=True)
        return LargestSizes(
            tuple(
                tuple(most if size <= most else math.ceil(MARGIN * size) for most, size in zip(*pair, strict=True))
                for pair in shapes
            )
        )

    def scaled(self, captured: CapturedCall, call: Call) -> CapturedCall:
        """A copy of `captured` whose bytes of eager code grow in proportion to these sizes over those of `call`."""
        own = LargestSizes.of(call).shapes
        if own == self.shapes:
            return captured
        growth = max([1.0, *(most / max(1, size) for most, size in _pairs(self.shapes, own))])
        return with_eager_bytes(captured, min(growth, MARGIN))

    def input_bytes(self, call: Call) -> tuple[int, ...]:
        """The bytes of each of the call's tensors at these sizes."""
        found: dict[object, int] = {}
        for tensor, shape in zip(tensors_in(call), self.shapes, strict=True):
            nbytes = max(tensor.untyped_storage().nbytes(), math.prod(shape) * tensor.element_size())
            found[storage_key(tensor)] = max(nbytes, found.get(storage_key(tensor), 0))
        return tuple(found.values())


def _pairs(shapes: Shapes, others: Shapes) -> Iterator[tuple[int, int]]:
    for shape, other in zip(shapes, others, strict=True):
        yield from zip(shape, other, strict=True)
