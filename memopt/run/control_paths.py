"""The control-flow paths through a model's regions that the forwards of one kind of call have taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from memopt.capture.data_sizes import MARGIN
from memopt.capture.dynamic_shapes import known_places, together, with_eager_bytes
from memopt.capture.inputs import Call
from memopt.capture.region import CapturedCall
from memopt.run.largest_sizes import LargestSizes

_MOST = 4
"""The number of paths that are kept: those that were taken last."""


@dataclass
class ControlPaths:
    """The control-flow paths that calls of one kind have taken, most recent first, each as a captured call.

    A path has the runs of many forwards, each of which leaves some of them out; forwards that run other regions on the
    same parameters take different paths."""

    calls: list[CapturedCall]
    sizes: LargestSizes
    """The largest inputs with which they were captured."""
    _margin: float = MARGIN
    _joins: dict[CapturedCall, tuple[CapturedCall, CapturedCall]] = field(default_factory=dict)
    """What a path was made of: the path before, and a capture that was put to it."""

    @classmethod
    def of(cls, captured: CapturedCall, call: Call) -> ControlPaths:
        """The first path that was seen."""
        return cls([captured], LargestSizes.of(call))

    def use(self, path: CapturedCall) -> None:
        """Make a path the first."""
        self.calls = [path, *(other for other in self.calls if other is not path)]

    def add(self, captured: CapturedCall, call: Call) -> None:
        """Put the capture of a call to the path that was taken last; where that drops some of its runs, beside it."""
        self.sizes = self.sizes.covering(call)
        captured = replace(captured, input_bytes=self.sizes.input_bytes(call))
        captured = self.sizes.scaled(captured, call)
        before = self.calls[0]
        roomier = with_eager_bytes(captured, self._margin) if _sizes_differ(before, captured) else captured
        both = together(before, roomier, self._margin)
        self._joins = {both: (before, captured)}
        kept = len([number for number in known_places(before.runs, both.runs) if number is not None])
        others = self.calls if kept < len(before.runs) else self.calls[1:]
        self.calls = [both, *others][:_MOST]

    def separate(self) -> CapturedCall | None:
        """Put the latest capture by itself before the first path, which it was joined to and which does not serve it:
        regions of the same operators may have other graphs for other sizes. None where it is by itself."""
        first = self.calls[0]
        if first not in self._joins or self._joins[first][1] is first:
            return None
        before, captured = self._joins[first]
        self._joins[captured] = before, captured
        self.calls = [captured, *self.calls][:_MOST]
        return captured

    def before(self, path: CapturedCall) -> CapturedCall | None:
        """The path that was taken before the first one was captured; None where there was none."""
        return self._joins[path][0] if path in self._joins else None

    def smaller(self) -> Iterator[CapturedCall]:
        """The first path; then, each where the one before it does not fit the budget: with its sizes as they were seen
        and no margin above them, and the latest capture by itself."""
        first = self.calls[0]
        yield first
        if first in self._joins:
            before, captured = self._joins[first]
            if self._margin > 1:
                self._margin = 1.0
                exact = together(before, captured, self._margin)
                self._joins[exact] = before, captured
                yield exact
            self._joins[captured] = before, captured
            yield captured

    def take(self, path: CapturedCall) -> None:
        """Have a path take the place of the first."""
        self.calls[0] = path


def _sizes_differ(one: CapturedCall, other: CapturedCall) -> bool:
    """Whether a run has other sizes in one of two captures."""
    numbers = known_places(one.runs, other.runs)
    pairs = ((one.runs[at], run) for at, run in zip(numbers, other.runs, strict=True) if at is not None)
    return any(ours.shapes != theirs.shapes for ours, theirs in pairs)
