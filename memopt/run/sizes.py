"""The sizes that calls of changing sizes are planned for, so that a few plans serve batches of all sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from memopt.capture.captured_call import CapturedCall
from memopt.capture.data_sizes import MARGIN, DataSizes
from memopt.capture.inputs import Call, Place, leaf_name, tensor_numbers, tensors_in
from memopt.capture.region import RecordedRegion, Sizes
from memopt.compat.symbols import limit_of, line_that_fixed, plain_symbol, sizes_up_to
from memopt.compat.tensors import special_kind, storage_key
from memopt.device.storages import storage_bytes
from memopt.errors import BudgetError, without_frames
from memopt.lru import LruCache
from memopt.run.executable import Executable


class SizeBounds:
    """The largest sizes for which plans are made: those that were seen, with a margin where sizes grow."""

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
        """The places whose sizes the model needs as constants."""

    def changing(self, call: Call) -> Collection[Place]:
        """The dimensions of a call's tensors that are captured as symbols: those declared as `dynamic`; and, if any
        size differs from the largest one seen, the dimensions that differ, and the first dimension of every tensor,
        since the last batch of an epoch is smaller. Those that the model needs as constants are left out."""
        shapes = [tensor.shape for tensor in tensors_in(call)]
        seen = {(number, dim) for number, shape in enumerate(shapes) for dim in range(len(shape))}
        changed = {place for place in seen if shapes[place[0]][place[1]] != self._largest.get(place)}
        changed &= self._largest.keys()
        self.changed |= changed
        first = {place for place in seen if place[1] == 0} if changed else set()
        return (changed | first | self.declared(call).keys()) - self.fixed

    def ahead(self, region: RecordedRegion, inputs: Sequence[Any], call: Call) -> Sizes:
        """The sizes for which a call is planned before its first run: the largest ones declared, else its own."""
        self.see(call)
        return self.above(region, inputs, call) if self.declared(call) else region.sizes_of(inputs)

    def above(self, region: RecordedRegion, inputs: Sequence[Any], call: Call, *, margin: float = MARGIN) -> Sizes:
        """The sizes to plan for where a call exceeds those of all plans. For each size that changes: the largest value
        that the user declared; or, if none was declared or the call exceeds it, the largest value seen. A value seen
        is multiplied by `margin` if it has grown from one call to another, or if no dimension of the call's
        tensors has this size; the result is limited to what the region's graph allows."""
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
                largest = math.ceil(margin * largest)
            limit = limit_of(region.inputs[number])
            found.append(largest if limit is None else min(largest, limit))
        return tuple(found)

    def see(self, call: Call) -> None:
        """Record the sizes of a call that is planned, or that runs plain."""
        for number, tensor in enumerate(tensors_in(call)):
            for dimension, size in enumerate(tensor.shape) if not special_kind(tensor) else ():
                place = number, dimension
                if size != self._largest.setdefault(place, size):
                    self.changed.add(place)
                if size > self._largest[place]:
                    self._largest[place] = size
                    self._grown.add(place)


def captured_for(region: RecordedRegion, ceiling: Sizes, inputs: Sequence[Any], call: Call) -> CapturedCall:
    """The captured call of a region that `call` runs on `inputs`, to be planned for sizes up to `ceiling`."""
    if not ceiling:
        return CapturedCall.of(region)
    symbols = list(region.changing.values())
    seen = dict(zip(symbols, region.sizes_of(inputs), strict=True))
    allowed = dict(zip(symbols, ceiling, strict=True))
    sizes = DataSizes(seen, allowed, _names_of(region, inputs, call))
    return CapturedCall.of(region, sizes, _input_bytes(region, allowed, inputs, call))


def insisted(region: RecordedRegion, inputs: Sequence[Any], call: Call, marked: Collection[Place]) -> dict[Place, str]:
    """The dimensions in `marked` that are constants in the region although Dynamo was to make symbols of their sizes;
    each with the line of the model that needs a constant. Dimensions are those of the call's tensors."""
    numbers = tensor_numbers(call)
    found: dict[Place, str] = {}
    for value, fake in zip(inputs, region.inputs, strict=True):
        for dimension in range(fake.dim() if id(value) in numbers else 0):
            place = numbers[id(value)], dimension
            if place in marked and (line := line_that_fixed(fake, dimension)):
                found[place] = line
    return found


def _names_of(region: RecordedRegion, inputs: Sequence[Any], call: Call) -> dict[str, str]:
    """For each symbol of a region's changing sizes, the size that it stands for, such as "input_ids.shape[1]"."""
    places = {symbol: next(places_of(region, symbol, inputs, call), None) for symbol in region.changing.values()}
    return {
        symbol: f"{leaf_name(call, place[0])}.shape[{place[1]}]" if place else symbol
        for symbol, place in places.items()
    }


def places_of(region: RecordedRegion, symbol: str, inputs: Sequence[Any], call: Call) -> Iterator[Place]:
    """The dimensions of the call's tensors whose size is `symbol` in the region's graph."""
    numbers = tensor_numbers(call)
    for value, fake in zip(inputs, region.inputs, strict=True):
        if id(value) in numbers:
            for dimension, size in enumerate(fake.shape):
                if plain_symbol(size) == symbol:
                    yield numbers[id(value)], dimension


def _input_bytes(
    region: RecordedRegion, allowed: Mapping[str, int], inputs: Sequence[Any], call: Call
) -> tuple[int, ...]:
    """The bytes of each of the call's tensors; for inputs of the region, at the largest sizes `allowed`."""
    largest: dict[int, int] = {}
    with sizes_up_to(allowed):
        for value, fake in zip(inputs, region.inputs, strict=True):
            if isinstance(value, torch.Tensor):
                largest[storage_key(value)] = storage_bytes(fake)
    own = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(call)}
    return tuple(max(size, largest.get(key, 0)) for key, size in own.items())


Shapes = tuple[Sizes, ...]
_SHAPE = attrgetter("shape")


def tensor_shapes(call: Call) -> Shapes:
    """The shapes of a call's tensors."""
    return tuple(map(tuple, map(_SHAPE, tensors_in(call))))


def cover(larger: Shapes, shapes: Shapes) -> bool:
    """Whether two calls have as many tensors, of as many dimensions, and no size of `shapes` is above that of
    `larger`."""
    alike = list(map(len, larger)) == list(map(len, shapes))
    return alike and all(covers(most, shape) for most, shape in zip(larger, shapes, strict=True))


_MOST = 6
"""The number of emitted plans that are kept."""
_MOST_WITH_SMALLER = 4
"""Plans for smaller batches are made while there are fewer plans than this, so that they never displace the largest."""
_NEGLIGIBLE = 0.02
"""A plan for smaller batches is not worth making if larger plans add less time than this fraction of the step."""
_SHRINKS = (0.75, 0.5)
"""The smaller sizes that are planned for, as fractions of the largest."""


class PlansBySize:
    """Emitted plans, each stored under the largest sizes that it serves."""

    def __init__(self) -> None:
        self.planning_seconds = math.inf
        """The seconds that the latest plan took to make."""
        self._emitted: LruCache[Sizes, Executable] = LruCache(_MOST)
        self._refused: LruCache[Sizes, BudgetError] = LruCache(_MOST)
        self._lost_seconds: LruCache[Sizes, float] = LruCache(_MOST)

    def get(self, ceiling: Sizes) -> Executable | None:
        """The plan for sizes up to `ceiling`, with its code; None where there is none."""
        return self._emitted.get(ceiling)

    def add(self, ceiling: Sizes, emitted: Executable, seconds: float) -> None:
        """Store a plan for sizes up to `ceiling` that took `seconds` to make."""
        self._emitted[ceiling] = emitted
        self.planning_seconds = seconds

    def refuse(self, ceiling: Sizes, refused: BudgetError) -> None:
        """Store the error `refused`: no plan fits sizes up to `ceiling`. From now on, a smaller call is planned for the
        largest sizes seen or for its own, not for `ceiling`."""
        self._refused[ceiling] = without_frames(refused)

    def refusal(self, ceiling: Sizes) -> BudgetError | None:
        """The stored error of these sizes, which no plan fits; None where they were not refused."""
        return self._refused.get(ceiling)

    def exceeds_budget(self, ceiling: Sizes) -> bool:
        """Whether these sizes, or smaller ones, were refused."""
        return any(covers(ceiling, refused) for refused in self._refused)

    def covering(self, sizes: Sizes) -> Sizes | None:
        """The ceiling whose plan a call of these sizes runs by; None where the call exceeds all ceilings.

        This is the ceiling of the plan with the least added time; or a smaller one that has no plan yet, once the
        recomputation of larger plans has cost calls of these sizes as much time as planning takes."""
        plans = self._covering(sizes)
        if not plans:
            return None
        best = min(plans, key=lambda ceiling: plans[ceiling].plan.added_time)
        smaller = self._worth_planning(best, sizes, plans)
        return best if smaller is None else smaller

    def best(self, sizes: Sizes) -> Executable | None:
        """The plan with the least added time of those that cover these sizes; None where none does."""
        return min(self._covering(sizes).values(), key=lambda emitted: emitted.plan.added_time, default=None)

    def _covering(self, sizes: Sizes) -> dict[Sizes, Executable]:
        return {ceiling: emitted for ceiling, emitted in self._emitted.items() if covers(ceiling, sizes)}

    def _worth_planning(self, best: Sizes, sizes: Sizes, plans: Mapping[Sizes, Executable]) -> Sizes | None:
        plan = plans[best].plan
        if plan.added_time <= _NEGLIGIBLE or len(self._emitted) >= _MOST_WITH_SMALLER:
            return None
        smaller = _smaller(max(plans, key=math.prod), sizes)
        if covers(smaller, best) or self.exceeds_budget(smaller):
            return None
        lost = plan.added_seconds * math.prod(sizes) / math.prod(best)
        self._lost_seconds[smaller] = lost = lost + (self._lost_seconds.get(smaller) or 0.0)
        return smaller if lost > self.planning_seconds else None


def covers(ceiling: Sizes, sizes: Sizes) -> bool:
    """Whether no size exceeds the corresponding one of `ceiling`."""
    return all(size <= most for size, most in zip(sizes, ceiling, strict=True))


def _smaller(ceiling: Sizes, sizes: Sizes) -> Sizes:
    """The smallest sizes that cover `sizes`, each `ceiling`'s own or one of a few fractions of it."""
    return tuple(
        min([most, *(shrunk for part in _SHRINKS if (shrunk := math.ceil(part * most)) >= size)])
        for size, most in zip(sizes, ceiling, strict=True)
    )
