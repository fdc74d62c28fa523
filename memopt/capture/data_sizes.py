"""Sizes that depend on data, such as the number of tokens that an expert gets: observed on a batch, planned for with a
margin, and checked at run time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from memopt.capture.inputs import Call, tensors_in
from memopt.compat.fakes import FakeTensor
from memopt.compat.operators import OpOverload, RunningBy, kernels_as_in_eager_mode, plain_tensors
from memopt.compat.symbols import data_symbols_of, known_sizes, largest_value, limit_of, plain_symbol
from memopt.compat.tensors import has_no_storage
from memopt.saved_values import values_restored
from memopt.training_state import containers_restored, undone

aten = torch.ops.aten
MARGIN = 1.25
"""Sizes that depend on data, have grown between batches or differ between runs of a region are planned for up to a
quarter more than was seen; a batch with larger ones is planned again."""
_MASK_DTYPES = (torch.bool, torch.uint8)
_SELECTING = (aten.index.Tensor, aten.masked_select.default, aten.nonzero.default)
"""Operators that select at most as many elements as their mask or argument has."""
_WHOLE_NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of the tensors whose `tolist()` Dynamo captures."""


@dataclass(frozen=True)
class Observed:
    """One operator call with a data-dependent result: the operator's name, and the result's shape or number."""

    op: str
    result: tuple[int, ...] | int


@dataclass(frozen=True)
class DataSizes:
    """Values of a graph's symbolic sizes, by symbol name: `seen` has the values in the current batch, `allowed` the
    largest values that the plan has room for.

    Data-dependent symbols in neither mapping count as their largest possible value."""

    seen: Mapping[str, int] = field(default_factory=dict)
    allowed: Mapping[str, int] = field(default_factory=dict)
    changing: Mapping[str, str] = field(default_factory=dict)
    """Symbol → the size of an input that it stands for, like "input_ids.shape[1]"; the other symbols depend on data."""

    @classmethod
    def of(cls, seen: Mapping[str, int], before: DataSizes | None = None) -> DataSizes:
        """The sizes `seen`, by symbol name, with limits a margin above them and no lower than those of `before`."""
        least = before.allowed if before else {}
        return cls(seen, {name: max(math.ceil(size * MARGIN), least.get(name, 0)) for name, size in seen.items()})

    def __or__(self, other: DataSizes) -> DataSizes:
        """The symbols of both."""
        return DataSizes(
            {**self.seen, **other.seen}, {**self.allowed, **other.allowed}, {**self.changing, **other.changing}
        )

    def notes(self) -> tuple[str, ...]:
        """Notes for the plan about the largest sizes that it has room for; empty where all sizes are fixed."""
        return (
            *self._note("sizes of the inputs that change between batches", changing=True),
            *self._note("sizes that depend on data", changing=False),
        )

    def _note(self, which: str, *, changing: bool) -> tuple[str, ...]:
        limits = ", ".join(
            f"{self.changing.get(name, name)} ≤ {most} (seen {self.seen.get(name)})"
            for name, most in self.allowed.items()
            if (name in self.changing) == changing
        )
        return (f"{which} are planned for up to {limits}; a batch with more is planned again",) if limits else ()


class SizeOutgrown(Exception):
    """Raised where a batch has a data-dependent size above the plan's limit, before memory for it is allocated."""


def observe(model: nn.Module, call: Call, run: Callable[..., Any]) -> tuple[Observed, ...]:
    """Run a forward of `model` without gradients and return the results of its data-dependent operators in order.

    Derivatives that the forward takes by `torch.autograd.grad` are zeros, since the true ones would need its
    activations. The model, random generators and the tensors, dictionaries and lists of the call are afterwards as
    before, also where the forward raises."""
    seen: list[Observed] = []
    kept = values_restored(tensors_in(call))
    with undone(model), kept, containers_restored(call), plain_tensors(), torch.no_grad(), _StandIn(), observing(seen):
        run(*call[0], **call[1])
    return tuple(seen)


def observing(observed: list[Observed]) -> RunningBy:
    """A context that appends the results of operators with data-dependent sizes, run on real tensors, to `observed`."""

    def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with kernels_as_in_eager_mode():
            result = func(*args, **kwargs)
        if _may_depend_on_data(func, args):
            first = _first(result)
            size = tuple(first.shape) if isinstance(first, torch.Tensor) else first
            if isinstance(size, (tuple, int)) and not isinstance(size, bool):  # a truth value is no size
                observed.append(Observed(str(func), size))
        return result

    return RunningBy(run)


class _StandIn(TorchFunctionMode):
    """Reads each number of `tolist()` by `item()`, as Dynamo captures it, since torch itself runs no operator for it.
    Returns zeros for `torch.autograd.grad`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and args[0].dtype in _WHOLE_NUMBERS:
            for number in args[0].flatten():
                number.item()
        if func is torch.autograd.grad:
            return _zeros(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _zeros(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *others: Any, is_grads_batched: bool = False, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Zeros with the shapes of what `torch.autograd.grad` returns for these arguments."""
    batch = _first(grad_outputs).shape[:1] if is_grads_batched else ()
    of = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return tuple([one.new_zeros((*batch, *one.shape)) for one in of])


def most_observed(one: Sequence[Observed], other: Sequence[Observed]) -> tuple[Observed, ...] | None:
    """For each operator call with a data-dependent result, the larger of its results (shapes or numbers, dimension
    by dimension) in two runs; None where the runs called different operators."""
    if [call.op for call in one] != [call.op for call in other]:
        return None
    pairs = zip(one, other, strict=True)
    return tuple(Observed(ours.op, _larger(ours.result, theirs.result)) for ours, theirs in pairs)


def _larger(one: tuple[int, ...] | int, other: tuple[int, ...] | int) -> tuple[int, ...] | int:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(map(max, one, other))
    assert isinstance(one, int)
    assert isinstance(other, int)
    return max(one, other)


def _first(value: Any) -> Any:
    """The first of several results; a single one as it is."""
    return value[0] if isinstance(value, (tuple, list)) else value


def _may_depend_on_data(op: Any, args: Sequence[Any]) -> bool:
    """Whether the size or the value of an operator's result may depend on data."""
    if torch.Tag.data_dependent_output in op.tags:
        return True
    if op is torch.ops.aten.index.Tensor:  # tagged for masks, used mostly with integers
        return any(index is not None and index.dtype in _MASK_DTYPES for index in args[1])
    return torch.Tag.dynamic_output_shape in op.tags


def new_symbols(graph: fx.Graph) -> Iterator[tuple[fx.Node, dict[str, int | None]]]:
    """The nodes whose values introduce data-dependent sizes or numbers. Each comes with a dict from its new symbols, by
    name, to the dimension of its tensor that has this size, or to None where the node's value is itself the number.

    Symbols for the offset of a view within its storage are left out: no bytes depend on them."""
    known: set[str] = set()
    for node in graph.nodes:
        names = data_symbols_of(node.meta.get("val")) - known
        if names and node.op == "call_function":
            known |= names
            if found := {name: dimension for name, dimension in _sizes(node).items() if name in names}:
                yield node, found


def _sizes(node: fx.Node) -> dict[str, int | None]:
    """The data-dependent symbols in the value of a node, by name, with the dimension of its tensor that has this size,
    or None where the value is itself the number. Those that stand in other places are left out."""
    value = node.meta.get("val")
    first, names = _first(value), sorted(data_symbols_of(value))
    if not isinstance(first, torch.Tensor):
        return dict.fromkeys(names)
    dimensions = {plain_symbol(size): dim for dim, size in reversed(list(enumerate(first.shape)))}
    return {name: dimensions[name] for name in names if name in dimensions}


def is_real(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values in memory: it is neither fake nor on "meta", and its storage has not been freed."""
    there = not tensor.is_meta and not isinstance(tensor, FakeTensor)
    in_storage = there and tensor.layout is torch.strided and not has_no_storage(tensor)
    return there and (not in_storage or tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)


def without_limit(graph: fx.Graph) -> frozenset[str]:
    """The data-dependent symbols of a graph whose values have no known upper limit."""
    found: set[str] = set()
    for node, symbols in new_symbols(graph):
        value = node.meta["val"]
        first = _first(value)
        sizes = {name: first if dimension is None else first.shape[dimension] for name, dimension in symbols.items()}
        found |= {name for name, size in sizes.items() if isinstance(size, torch.SymInt) and limit_of(size) is None}
    return frozenset(found)


def limits_by_operators(graph: fx.Graph, names: Collection[str], largest: Mapping[str, int]) -> dict[str, int]:
    """Upper limits, by symbol name, of those symbols in `names` that count the elements which a mask selects from a
    tensor, or the elements of a tensor that are not zero. Each limit is the number of all elements. Where that depends
    on symbols itself, `largest` has their largest values by name.

    A mask may be applied in the backward only, so that no run of the forward shows how many elements it selects."""
    found: dict[str, int] = {}
    for node, symbols in new_symbols(graph):
        if node.target in _SELECTING and (counted := [name for name in symbols if name in names]):
            values = [one.meta.get("val") for one in node.all_input_nodes]
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            masks = [tensor for tensor in tensors if tensor.dtype in _MASK_DTYPES]
            with known_sizes({**largest, **found}):  # a mask of what another one has selected
                most = _most_elements(masks if node.target is aten.index.Tensor else tensors)
            found |= dict.fromkeys(counted, most)
    return found


def _most_elements(tensors: Iterable[torch.Tensor]) -> int:
    """The most elements that these tensors have in the shape to which they are broadcast."""
    shapes = [[largest_value(size) for size in reversed(one.shape)] for one in tensors]
    return math.prod(map(max, zip_longest(*shapes, fillvalue=1)))


def match(graph: fx.Graph, observed: Sequence[Observed]) -> dict[str, int] | None:
    """The values of a joint graph's data-dependent symbols, by symbol name. They are taken from `observed`, the results
    in a run of the same forward. The graph's operators are matched with these in order, also those that introduce no
    symbol: if one mask selects from two tensors, the second result has the symbol of the first.

    None where an operator that introduces symbols has no result in `observed`."""
    position, values = 0, dict[str, int]()
    introduced = dict(new_symbols(graph))
    for node in graph.nodes:
        new = introduced.get(node, {})
        read: Any = fx.map_arg(node.args, lambda source: source.meta.get("val"))
        if not (new or (isinstance(node.target, OpOverload) and _may_depend_on_data(node.target, read))):
            continue
        known = {name: dim for name, dim in _sizes(node).items() if name in values}
        left = range(position, len(observed))
        named = (at for at in left if observed[at].op == str(node.target))
        fits = (at for at in named if all(_size(observed[at], dim) == values[name] for name, dim in known.items()))
        found = next(fits, None)
        if found is not None:
            position = found + 1
            values |= {name: _size(observed[found], dimension) for name, dimension in new.items()}
        elif new:
            return None
    return values


def _size(one: Observed, dimension: int | None) -> int:
    size = one.result if dimension is None else one.result[dimension]  # type: ignore[index]
    assert isinstance(size, int)
    return size


def guard_sizes(forward: fx.GraphModule, allowed: Mapping[str, int]) -> None:
    """Add a check to a forward graph for each symbol in `allowed`, which has their largest values by name: the check
    raises `SizeOutgrown` where a value is larger. Edits the graph."""
    for node, symbols in list(new_symbols(forward.graph)):
        for name, dimension in symbols.items():
            if name in allowed:
                with forward.graph.inserting_after(node):
                    forward.graph.call_function(check_size, (node, dimension, allowed[name]))


@fx.node.has_side_effect
def check_size(value: Any, dimension: int | None, most: int) -> None:
    """Raise `SizeOutgrown` if `value`, a number, or the size of `value`, a tensor, in `dimension`, is above `most`."""
    first = _first(value)
    size = first if dimension is None else first.shape[dimension]
    if size > most:
        raise SizeOutgrown(f"a data-dependent size is {size}, but the plan has room for at most {most}")
