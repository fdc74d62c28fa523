"""Chooses the sizes that calls of changing sizes are planned for, so that a few plans serve batches of all sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from memopt.capture.data_sizes import MARGIN, DataSizes
from memopt.capture.dynamic_shapes import Place, all_places
from memopt.capture.inputs import Call, leaf_name, tensor_numbers, tensors_in
from memopt.capture.region import CapturedCall, RecordedRegion, Sizes
from memopt.compat.storages import storage_key
from memopt.compat.subclasses import special_kind
from memopt.compat.symbols import limit_of, line_that_fixed, plain_symbol, sizes_up_to
from memopt.device.storages import storage_bytes


class SizeBounds:
    """The largest sizes that plans are for: those that were seen, with a margin where they grow."""

    def __init__(self, declared: Callable[[Call], Mapping[Place, int | None]]) -> None:
        self.declared = declared
        """Returns the places of a call whose sizes the user declares to change, and the largest size of each."""
        self._largest: dict[Place, int] = {}
        """The largest size seen."""
        self._grown: set[Place] = set()
        """The places where a later batch exceeded an earlier one."""
        self.changed: set[Place] = set()
        """The places whose sizes were seen to change."""
        self.fixed: set[Place] = set()
        """The places whose sizes the model insists on."""

    def changing(self, call: Call) -> Collection[Place]:
        """The places of a call whose sizes are to be symbols: those that are declared, and, once any size has changed,
        that size and the first of every tensor, since the last batch of an epoch is smaller."""
        shapes = [tensor.shape for tensor in tensors_in(call)]
        seen = all_places(call)
        changed = {place for place in seen if shapes[place[0]][place[1]] != self._largest.get(place)}
        changed &= self._largest.keys()
        self.changed |= changed
        first = {place for place in seen if place[1] == 0} if changed else set()
        return (changed | first | self.declared(call).keys()) - self.fixed

    def ahead(self, region: RecordedRegion, inputs: Sequence[Any], call: Call) -> Sizes:
        """The sizes to plan for a call ahead of its run: the largest that are declared, else its own."""
        self.see(call)
        return self.above(region, inputs, call) if self.declared(call) else region.sizes_of(inputs)

    def above(self, region: RecordedRegion, inputs: Sequence[Any], call: Call) -> Sizes:
        """The sizes to plan for a call that exceeds all plans: the largest that are declared, else with a margin."""
        self.see(call)
        declared = self.declared(call) if region.changing else {}
        found = []
        for number, symbol in region.changing.items():
            places = list(places_of(region, symbol, inputs, call))
            limits = [most for place in places if (most := declared.get(place)) is not None]
            if limits and inputs[number] <= min(limits):
                found.append(min(limits))
                continue
            largest = max([inputs[number], *(self._largest.get(place, 0) for place in places)])
            if not places or any(place in self._grown for place in places):
                largest = math.ceil(MARGIN * largest)
            limit = limit_of(region.inputs[number])
            found.append(largest if limit is None else min(largest, limit))
        return tuple(found)

    def see(self, call: Call) -> None:
        """Note the sizes of a call that is planned, or that runs as the plain model does."""
        for number, tensor in enumerate(tensors_in(call)):
            for dimension, size in enumerate(tensor.shape) if not special_kind(tensor) else ():
                place = number, dimension
                if size != self._largest.setdefault(place, size):
                    self.changed.add(place)
                if size > self._largest[place]:
                    self._largest[place] = size
                    self._grown.add(place)


def captured_for(region: RecordedRegion, ceiling: Sizes, inputs: Sequence[Any], call: Call) -> CapturedCall:
    """The call of a region to be planned for sizes up to `ceiling`."""
    if not ceiling:
        return CapturedCall.of(region)
    symbols = list(region.changing.values())
    seen = dict(zip(symbols, region.sizes_of(inputs), strict=True))
    allowed = dict(zip(symbols, ceiling, strict=True))
    sizes = DataSizes(seen, allowed, _names_of(region, inputs, call))
    return CapturedCall.of(region, sizes, _input_bytes(region, allowed, inputs, call))


def insisted(region: RecordedRegion, inputs: Sequence[Any], call: Call, marked: Collection[Place]) -> dict[Place, str]:
    """The marked places whose sizes are numbers in a region, each with the line of the model for which it is one."""
    numbers = tensor_numbers(call)
    found: dict[Place, str] = {}
    for value, fake in zip(inputs, region.inputs, strict=True):
        for dimension in range(fake.dim() if id(value) in numbers else 0):
            place = numbers[id(value)], dimension
            if place in marked and (line := line_that_fixed(fake, dimension)):
                found[place] = line
    return found


def _names_of(region: RecordedRegion, inputs: Sequence[Any], call: Call) -> dict[str, str]:
    """Symbol → the size that it stands for, like "input_ids.shape[1]", for the changing sizes of a region."""
    places = {symbol: next(places_of(region, symbol, inputs, call), None) for symbol in region.changing.values()}
    return {
        symbol: f"{leaf_name(call, place[0])}.shape[{place[1]}]" if place else symbol
        for symbol, place in places.items()
    }


def places_of(region: RecordedRegion, symbol: str, inputs: Sequence[Any], call: Call) -> Iterator[Place]:
    """The places of the call that have a symbol as size."""
    numbers = tensor_numbers(call)
    for value, fake in zip(inputs, region.inputs, strict=True):
        if id(value) in numbers:
            for dimension, size in enumerate(fake.shape):
                if plain_symbol(size) == symbol:
                    yield numbers[id(value)], dimension


def _input_bytes(
    region: RecordedRegion, allowed: Mapping[str, int], inputs: Sequence[Any], call: Call
) -> tuple[int, ...]:
    """The bytes of each of the call's tensors, at the largest sizes for those that the region takes."""
    largest: dict[int, int] = {}
    with sizes_up_to(allowed):
        for value, fake in zip(inputs, region.inputs, strict=True):
            if isinstance(value, torch.Tensor):
                largest[storage_key(value)] = storage_bytes(fake)
    own = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(call)}
    return tuple(max(size, largest.get(key, 0)) for key, size in own.items())
