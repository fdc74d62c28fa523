"""Sizes that change from batch to batch: those that users declare, and those that differ between captures of a call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.capture.captured_call import CapturedCall, RegionRun
from memopt.capture.data_sizes import MARGIN, most_observed
from memopt.capture.inputs import Call, replaced_tensors, tensor_numbers, tensors_in
from memopt.capture.region import Sizes
from memopt.compat.dynamo import marked_changing


def together(known: CapturedCall, further: CapturedCall, margin: float = MARGIN) -> CapturedCall:
    """Two captures of a call merged into one to plan for, with the runs of regions of both in order. Each capture may
    lack some runs of the other.

    A run that has other sizes in `further` is planned for the larger ones, times `margin`. Where `further` has runs of
    other regions on the same parameters, those of `known` are dropped, since a forward runs only one of the two."""
    if [(run.place, run.passed) for run in known.runs] != [(run.place, run.passed) for run in further.runs]:
        known, further = (  # without references to other runs by number, as these may change
            replace(call, runs=tuple(replace(run, passed=run.passed.without_runs()) for run in call.runs))
            for call in (known, further)
        )
    runs: list[RegionRun] = []
    for kind, begin, end, other_begin, other_end in _blocks(known.runs, further.runs):
        ours, theirs = known.runs[begin:end], further.runs[other_begin:other_end]
        if kind == "equal":
            pairs = zip(ours, theirs, strict=True)
            runs += [
                replace(
                    larger := _larger(run, other, margin),
                    observed=most_observed(run.observed, other.observed) or larger.observed,
                    eager=run.eager | other.eager,
                    passed=run.passed if run.passed == other.passed else run.passed & other.passed,
                )
                for run, other in pairs
            ]
            continue
        taken = {parameter for run in theirs for parameter in run.parameter_ids.values()}
        runs += [run for run in ours if taken.isdisjoint(run.parameter_ids.values())]
        runs += theirs
    return replace(
        known,
        runs=tuple(runs),
        ending=known.ending | further.ending,
        returned_bytes=max(known.returned_bytes, further.returned_bytes),
        input_bytes=max(known.input_bytes, further.input_bytes, key=sum),
        eager=known.eager | further.eager,
    )


def known_places(before: Sequence[RegionRun], now: Sequence[RegionRun]) -> tuple[int | None, ...]:
    """For each run in `now`, the index in `before` of the run that a plan may treat as the same; None if there is
    none."""
    numbers: list[int | None] = []
    for kind, begin, end, now_begin, now_end in _blocks(before, now):
        numbers += range(begin, end) if kind == "equal" else [None] * (now_end - now_begin)
    return tuple(numbers)


def _blocks(runs: Sequence[RegionRun], others: Sequence[RegionRun]) -> Sequence[tuple[str, int, int, int, int]]:
    places, other_places = ([run.place for run in some] for some in (runs, others))
    return SequenceMatcher(None, places, other_places, autojunk=False).get_opcodes()


def with_eager_bytes(call: CapturedCall, factor: float) -> CapturedCall:
    """A copy of `call` with the bytes of the code between regions multiplied by `factor`."""
    runs = tuple(replace(run, eager=run.eager.scaled(factor)) for run in call.runs)
    return replace(call, runs=runs, ending=call.ending.scaled(factor))


def _larger(run: RegionRun, other: RegionRun, margin: float) -> RegionRun:
    """The run to plan in place of two at the same place: the one whose region has symbols for the sizes that differ,
    for the sizes of both."""
    if len(other.region.changing) > len(run.region.changing):
        needed = _sizes_for(other, run)
        return replace(other, most=tuple(math.ceil(margin * size) for size in needed))
    if not run.region.changing:
        return max(run, other, key=lambda one: sum(map(math.prod, one.shapes)))
    needed = other.sizes if run.region is other.region else _sizes_for(run, other)
    pairs = zip(run.sizes, needed, strict=True)
    most = tuple(
        limit if one == size else max(limit, math.ceil(margin * max(one, size)))
        for (one, size), limit in zip(pairs, run.most, strict=True)
    )
    seen = other.sizes if run.region is other.region else run.sizes
    return replace(run, sizes=seen, most=most)


def _sizes_for(run: RegionRun, other: RegionRun) -> Sizes:
    """The changing sizes of a run, all multiplied by the factor that its input shapes need to reach those of `other`, a
    run of another region."""
    pairs = zip(run.shapes, other.shapes, strict=False)
    ratios = (theirs / max(1, ours) for one, two in pairs for ours, theirs in zip(one, two, strict=False))
    growth = max([1.0, *ratios])
    return tuple(math.ceil(size * growth) for size in run.sizes)


Place: TypeAlias = tuple[int, int]
"""The number of a tensor in `tensors_in(call)`, and one of its dimensions."""


def declared_sizes(dynamic: Any, call: Call, model: nn.Module, *, with_targets: bool) -> dict[Place, int | None]:
    """The dimensions of a call's tensors that the user declares to change, as `(number of the tensor, dimension)`, each
    with its largest size, or None where the declaration has no `max`.

    Args:
        dynamic: nested like the batch (a dict by the forward's argument names, or a tuple), with `{dimension: Dim}` or
            a sequence of one `Dim` per dimension for a tensor, None for what does not change. A `Dim` is
            `torch.export.Dim("length", max=2048)`, `Dim.AUTO` or `Dim.DYNAMIC`; None, `Dim.STATIC` and numbers are
            sizes that do not change.
        with_targets: the call is `(inputs, targets)`, as with a `loss_fn`.

    Raises `ValueError` for a name, a dimension or a value that does not fit the batch."""
    if dynamic is None:
        return {}
    numbers = tensor_numbers(call)
    given: Any = call[0]
    if with_targets and len(given) == 1:
        (given,) = given  # the batch of a loss function that takes the model
    elif not with_targets and isinstance(dynamic, Mapping):
        given = {**dict(zip(inspect.signature(model.forward).parameters, call[0], strict=False)), **call[1]}
    return {
        (numbers[id(tensor)], dimension): most
        for tensor, dimensions in _matched(dynamic, given, "dynamic")
        for dimension, most in dimensions.items()
    }


def all_places(call: Call) -> set[Place]:
    """All dimensions of a call's tensors, each as `(number of the tensor in tensors_in, dimension)`."""
    return {(number, dim) for number, tensor in enumerate(tensors_in(call)) for dim in range(tensor.dim())}


def markable(call: Call, places: Collection[Place]) -> set[Place]:
    """The part of `places`, pairs `(number of the tensor, dimension)`, whose sizes can become symbols: those above 1,
    since torch takes sizes of 0 and 1 as constants."""
    tensors = tensors_in(call)
    return {(number, dimension) for number, dimension in places if tensors[number].shape[dimension] > 1}


def marked(call: Call, places: Collection[Place]) -> AbstractContextManager[None]:
    """A context in which Dynamo, when it captures `call`, makes symbols of the sizes at `places`: dimensions of the
    call's tensors, each as `(number of the tensor, dimension)`."""
    tensors = tensors_in(call)
    return marked_changing([(tensors[number], dimension) for number, dimension in places])


def at_largest(call: Call, places: Mapping[Place, int | None]) -> Call:
    """The call with "meta" tensors in place of its tensors, in which each dimension in `places` has its declared
    largest size, if it has one. The call itself where no largest size is declared."""
    if not any(places.values()):
        return call
    numbers = tensor_numbers(call)

    def largest(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        for (number, dimension), most in places.items():
            if number == numbers[id(tensor)] and most is not None:
                shape[dimension] = most
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    return replaced_tensors(call, largest)


def _matched(dynamic: Any, given: Any, path: str) -> Iterator[tuple[torch.Tensor, dict[int, int | None]]]:
    """The tensors in `given` that have changing sizes: their dimensions, and the largest size of each.

    `path` names this part of `dynamic` in errors. Raises `ValueError` where it is not nested as `given` is, or names
    what `given` does not have."""
    if dynamic is None:
        return
    if isinstance(given, torch.Tensor):
        yield given, _dimensions(dynamic, given, path)
    elif isinstance(given, Mapping) and isinstance(dynamic, Mapping):
        for name, inner in dynamic.items():
            if name not in given:
                raise ValueError(
                    f"{path} names {name!r}, which is not in the batch; it has {', '.join(map(repr, given))}"
                )
            yield from _matched(inner, given[name], f"{path}[{name!r}]")
    elif isinstance(given, Sequence) and isinstance(dynamic, Sequence) and len(dynamic) <= len(given):
        for number, inner in enumerate(dynamic):
            yield from _matched(inner, given[number], f"{path}[{number}]")
    else:
        raise ValueError(
            f"{path} must be nested like the batch, such as {{'input_ids': {{1: Dim('length', max=2048)}}}}, "
            f"not {dynamic!r}"
        )


def _dimensions(dynamic: Any, tensor: torch.Tensor, path: str) -> dict[int, int | None]:
    """The changing dimensions of one tensor, with the largest size of each if it has one.

    Raises `ValueError` for what is no such dimensions, for a dimension that the tensor does not have, and for a largest
    size below its own."""
    if isinstance(dynamic, str) or not isinstance(dynamic, (Mapping, Sequence)):
        raise ValueError(f"{path} must name dimensions, such as {{1: Dim('length', max=2048)}}, not {dynamic!r}")
    sizes = dynamic.items() if isinstance(dynamic, Mapping) else enumerate(dynamic)
    found: dict[int, int | None] = {}
    for dimension, dim in sizes:
        if not isinstance(dimension, int) or not -tensor.dim() <= dimension < tensor.dim():
            raise ValueError(
                f"{path} names dimension {dimension!r} of a tensor of shape {tuple(tensor.shape)}; name one it has"
            )
        place = dimension % tensor.dim()
        if dim is None or isinstance(dim, int) or dim == torch.export.Dim.STATIC:
            continue
        if not (isinstance(dim, type(torch.export.Dim.AUTO)) or hasattr(dim, "max")):
            raise ValueError(
                f"{path}[{dimension}] must be a torch.export.Dim, such as Dim('length', max=2048), or None for "
                f"a size that does not change, not {dim!r}"
            )
        most = getattr(dim, "max", None)
        found[place] = int(most) if most is not None and most < 2**60 else None
        if found[place] is not None and tensor.shape[place] > found[place]:  # type: ignore[operator]
            raise ValueError(
                f"{path}[{dimension}] says that dimension {dimension} is at most {found[place]}, but the batch has "
                f"{tensor.shape[place]}; give that Dim a larger max, or a smaller batch"
            )
    return found
