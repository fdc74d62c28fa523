"""Two ways of a forward through a model's regions as one, so that a plan serves both of them and what lies between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from memopt.capture.between import Passed
from memopt.capture.data_sizes import MARGIN, most_observed
from memopt.capture.region import CapturedCall, RegionRun, Sizes


def together(known: CapturedCall, further: CapturedCall, margin: float = MARGIN) -> CapturedCall:
    """A call with the runs of both captures, in the order of both, so that each of them leaves out some of its runs.

    A run that has other sizes in `further` is planned for the larger ones, with a margin. Runs of `known` are dropped
    where `further` has runs of other regions on the same parameters in their place: a forward takes one of these ways
    and not both.
    """
    if _numbered(known) != _numbered(further):
        known, further = (replace(call, runs=_without_numbers(call.runs)) for call in (known, further))
    runs: list[RegionRun] = []
    for kind, begin, end, other_begin, other_end in _matched(known.runs, further.runs):
        ours, theirs = known.runs[begin:end], further.runs[other_begin:other_end]
        if kind == "equal":
            pairs = zip(ours, theirs, strict=True)
            runs += [
                replace(
                    _as_observed(_larger(run, other, margin), run, other),
                    eager=run.eager | other.eager,
                    passed=run.passed if run.passed == other.passed else run.passed & other.passed,
                )
                for run, other in pairs
            ]
            continue
        taken = {parameter for run in theirs for parameter in run.parameter_ids.values()}
        runs += [run for run in ours if taken.isdisjoint(run.parameter_ids.values())]
        runs += theirs
    eager = known.eager | further.eager
    held_bytes = max(known.held_bytes, further.held_bytes)
    after_bytes = max(known.after_bytes, further.after_bytes)
    input_bytes = max(known.input_bytes, further.input_bytes, key=sum)
    return replace(
        known, runs=tuple(runs), held_bytes=held_bytes, after_bytes=after_bytes, input_bytes=input_bytes, eager=eager
    )


def _numbered(call: CapturedCall) -> list[tuple[object, Passed]]:
    """The place of each run and what it passes on: runs of calls in which these are equal have the same numbers."""
    return [(run.place, run.passed) for run in call.runs]


def _without_numbers(runs: Sequence[RegionRun]) -> tuple[RegionRun, ...]:
    """The runs of a call whose numbers may change: what is passed on names no other run."""
    return tuple(replace(run, passed=run.passed.without_runs()) for run in runs)


def known_places(before: Sequence[RegionRun], now: Sequence[RegionRun]) -> tuple[int | None, ...]:
    """For each run of `now`, the number of the run in `before` whose place it takes; None for a new one."""
    numbers: list[int | None] = []
    for kind, begin, end, now_begin, now_end in _matched(before, now):
        numbers += range(begin, end) if kind == "equal" else [None] * (now_end - now_begin)
    return tuple(numbers)


def _matched(runs: Sequence[RegionRun], others: Sequence[RegionRun]) -> Sequence[tuple[str, int, int, int, int]]:
    places, other_places = ([run.place for run in some] for some in (runs, others))
    return SequenceMatcher(None, places, other_places, autojunk=False).get_opcodes()


def with_eager_bytes(call: CapturedCall, factor: float) -> CapturedCall:
    """A copy of `call` with the bytes of the code between regions multiplied by `factor`."""
    held_bytes, after_bytes = math.ceil(factor * call.held_bytes), math.ceil(factor * call.after_bytes)
    runs = tuple(replace(run, eager=run.eager.scaled(factor)) for run in call.runs)
    return replace(call, runs=runs, held_bytes=held_bytes, after_bytes=after_bytes)


def _larger(run: RegionRun, other: RegionRun, margin: float) -> RegionRun:
    """The run to plan for two runs in the same place: that of the region with symbols for the sizes that differ, for
    the sizes of both."""
    if len(other.region.changing) > len(run.region.changing):
        needed = _sizes_for(other, run)
        return replace(other, most=_with_margin(needed, margin))
    if not run.region.changing:
        return max(run, other, key=_volume)
    needed = other.sizes if run.region is other.region else _sizes_for(run, other)
    pairs = zip(run.sizes, needed, strict=True)
    most = tuple(
        limit if one == size else max(limit, math.ceil(margin * max(one, size)))
        for (one, size), limit in zip(pairs, run.most, strict=True)
    )
    seen = other.sizes if run.region is other.region else run.sizes
    return replace(run, sizes=seen, most=most)


def _as_observed(chosen: RegionRun, run: RegionRun, other: RegionRun) -> RegionRun:
    """The one of two runs that is planned, for the larger ones of the sizes that were observed in both."""
    return replace(chosen, observed=most_observed(run.observed, other.observed) or chosen.observed)


def _sizes_for(run: RegionRun, other: RegionRun) -> Sizes:
    """The sizes of a run, so much larger that they are enough for the inputs of `other`, whose region has numbers for
    them."""
    pairs = zip(run.shapes, other.shapes, strict=False)
    ratios = (theirs / max(1, ours) for one, two in pairs for ours, theirs in zip(one, two, strict=False))
    growth = max([1.0, *ratios])
    return tuple(math.ceil(size * growth) for size in run.sizes)


def _with_margin(sizes: Sizes, margin: float) -> Sizes:
    return tuple(math.ceil(margin * size) for size in sizes)


def _volume(run: RegionRun) -> int:
    return sum(map(math.prod, run.shapes))
