"""Chooses the sizes that calls of changing sizes are planned for, so that a few plans serve batches of all sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from memopt.capture.data_sizes import DataSizes
from memopt.capture.dynamic_shapes import Place
from memopt.capture.inputs import Call, leaf_name, tensor_numbers, tensors_in
from memopt.capture.region import CapturedCall, RecordedRegion, Sizes
from memopt.compat.symbols import known_sizes, limit_of, plain_symbol
from memopt.device.storages import storage_bytes
from memopt.planning.plan import Plan

MARGIN = 1.25
"""A size that has grown from one batch to a later one is planned for up to 25 % more than was seen."""
_NEGLIGIBLE = 0.02
"""Added time, as a fraction of the step, below which a plan for smaller batches is not worth its planning."""
_SHRINKS = (0.75, 0.5)
"""Smaller ceilings, as fractions of the largest one."""
_HITS = 3
"""Batches that would run by a plan for a smaller ceiling before it is made."""


class Ceilings:
    """The largest sizes that plans are for: those that were seen, with a margin where they grow."""

    def __init__(self, declared: Callable[[Call], Mapping[Place, int | None]]) -> None:
        self.declared = declared
        """Returns the places of a call whose sizes the user declares to change, and the largest size of each."""
        self._largest: dict[Place, int] = {}
        """The largest size seen in the calls that were planned."""
        self._grown: set[Place] = set()
        """The places where a later batch exceeded an earlier one."""
        self._too_large: set[tuple[RecordedRegion, Sizes]] = set()
        self._hits: Counter[tuple[RecordedRegion, Sizes]] = Counter()

    def changing(self, call: Call) -> Collection[Place]:
        """The places of a call whose sizes are to be symbols: those that are declared, and, once any size has changed,
        that size and the first of every tensor, since the last batch of an epoch is smaller."""
        shapes = [tensor.shape for tensor in tensors_in(call)]
        seen = {(number, dimension) for number, shape in enumerate(shapes) for dimension in range(len(shape))}
        changed = {place for place in seen if shapes[place[0]][place[1]] != self._largest.get(place)}
        changed &= self._largest.keys()
        first = {place for place in seen if place[1] == 0} if changed else set()
        return changed | first | self.declared(call).keys()

    def covering(self, region: RecordedRegion, sizes: Sizes, plans: Mapping[Sizes, Plan]) -> Sizes | None:
        """The sizes by whose plan a call runs, out of those that `plans` are for, or smaller ones that are worth a
        plan of their own by now; None where the call exceeds all of them."""
        enough = [ceiling for ceiling in plans if _covers(ceiling, sizes)]
        if not enough:
            return None
        best = min(enough, key=lambda ceiling: plans[ceiling].added_time)
        if plans[best].added_time > _NEGLIGIBLE:
            smaller = _smaller(best, sizes)
            if smaller not in plans:
                self._hits[region, smaller] += 1
                if self._hits[region, smaller] >= _HITS:
                    return smaller
        return best

    def ahead(self, region: RecordedRegion, inputs: Sequence[Any], call: Call) -> Sizes:
        """The sizes to plan for a call ahead of its run: the largest that are declared, else its own."""
        self._see(call)
        return self.above(region, inputs, call) if self.declared(call) else region.sizes_of(inputs)

    def do_not_fit(self, region: RecordedRegion, ceiling: Sizes) -> None:
        """Note that no plan for these sizes fits, so that smaller calls are planned for their own."""
        self._too_large.add((region, ceiling))

    def above(self, region: RecordedRegion, inputs: Sequence[Any], call: Call) -> Sizes:
        """The sizes to plan for a call that exceeds all plans: with a margin, unless that is known not to fit."""
        ceiling = self._with_margin(region, inputs, call)
        return region.sizes_of(inputs) if (region, ceiling) in self._too_large else ceiling

    def _with_margin(self, region: RecordedRegion, inputs: Sequence[Any], call: Call) -> Sizes:
        self._see(call)
        numbers, declared = tensor_numbers(call), self.declared(call) if region.changing else {}
        found = []
        for number, symbol in region.changing.items():
            places = list(_places(region, symbol, inputs, numbers))
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

    def _see(self, call: Call) -> None:
        for number, tensor in enumerate(tensors_in(call)):
            for dimension, size in enumerate(tensor.shape):
                place = number, dimension
                if size > self._largest.setdefault(place, size):
                    self._largest[place] = size
                    self._grown.add(place)


def captured_for(region: RecordedRegion, ceiling: Sizes, inputs: Sequence[Any], call: Call) -> CapturedCall:
    """The call of a region to be planned for sizes up to `ceiling`."""
    if not ceiling:
        return CapturedCall.of(region)
    numbers = tensor_numbers(call)
    symbols = list(region.changing.values())
    seen = dict(zip(symbols, region.sizes_of(inputs), strict=True))
    allowed = dict(zip(symbols, ceiling, strict=True))
    places = {symbol: next(_places(region, symbol, inputs, numbers), None) for symbol in symbols}
    names = {symbol: f"{leaf_name(call, place[0])}.shape[{place[1]}]" for symbol, place in places.items() if place}
    sizes = DataSizes(seen, allowed, {symbol: names.get(symbol, symbol) for symbol in symbols})
    return CapturedCall.of(region, sizes, _more_bytes(region, allowed, inputs, numbers))


def _places(region: RecordedRegion, symbol: str, inputs: Sequence[Any], numbers: Mapping[int, int]) -> Iterator[Place]:
    """The tensors of the call, by number, and their dimensions that have the symbol as size."""
    for value, fake in zip(inputs, region.inputs, strict=True):
        if id(value) in numbers:
            for dimension, size in enumerate(fake.shape):
                if plain_symbol(size) == symbol:
                    yield numbers[id(value)], dimension


def _more_bytes(
    region: RecordedRegion, allowed: Mapping[str, int], inputs: Sequence[Any], numbers: Mapping[int, int]
) -> int:
    """The bytes by which the call's tensors at the largest sizes exceed those at hand."""
    own = set(numbers)
    more = 0
    with known_sizes(allowed):
        for value, fake in zip(inputs, region.inputs, strict=True):
            if id(value) in own:
                own.discard(id(value))
                more += max(0, storage_bytes(fake) - value.untyped_storage().nbytes())
    return more


def _covers(ceiling: Sizes, sizes: Sizes) -> bool:
    return all(size <= most for size, most in zip(sizes, ceiling, strict=True))


def _smaller(ceiling: Sizes, sizes: Sizes) -> Sizes:
    """The smallest of a few fractions of each ceiling that still covers the sizes."""
    return tuple(
        min([most, *(shrunk for part in _SHRINKS if (shrunk := math.ceil(part * most)) >= size)])
        for size, most in zip(sizes, ceiling, strict=True)
    )
