"""Sizes that depend on data (the tokens that an expert gets): seen on a batch, planned for with a margin, guarded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memopt.compat.dispatch import TorchDispatchMode, plain_tensors
from memopt.compat.fakes import FakeTensor
from memopt.compat.symbols import data_symbols_of, plain_symbol

MARGIN = 1.25
"""Plans allow for a quarter more than was seen; a batch with more than that is planned anew."""
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Observed:
    """What one op with a data-dependent result gave: its name, and the shape or the number."""

    op: str
    result: tuple[int, ...] | int


@dataclass(frozen=True)
class DataSizes:
    """Values of a graph's data-dependent symbols, by name: as `seen`, and the `allowed` most that is planned for.

    Symbols that neither knows count as the largest they may be.
    """

    seen: Mapping[str, int] = field(default_factory=dict)
    allowed: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, seen: Mapping[str, int], before: DataSizes | None = None) -> DataSizes:
        """Allow a margin above what is seen now, and no less than `before`."""
        least = before.allowed if before else {}
        return cls(seen, {name: max(math.ceil(size * MARGIN), least.get(name, 0)) for name, size in seen.items()})

    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know of them."""
        if not self.allowed:
            return ()
        sizes = ", ".join(f"{name} ≤ {most} (seen {self.seen.get(name)})" for name, most in self.allowed.items())
        return (f"sizes that depend on data are planned for up to {sizes}; a batch with more is planned anew",)


class SizeOutgrown(Exception):
    """A batch has more of something than the plan allows for; raised before the memory for it is taken."""


def observe(run: Callable[[], Any]) -> tuple[Observed, ...]:
    """Run a forward without gradients and note what its data-dependent ops give. Leaves its traces in buffers and
    generators: the caller undoes them."""
    recorder = _Recorder()
    with plain_tensors(), torch.no_grad(), recorder:
        run()
    return tuple(recorder.observed)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observed: list[Observed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _may_depend_on_data(func, args):
            first = result[0] if isinstance(result, (tuple, list)) else result
            size = tuple(first.shape) if isinstance(first, torch.Tensor) else first
            if isinstance(size, (tuple, int)):
                self.observed.append(Observed(str(func), size))
        return result


def _may_depend_on_data(op: Any, args: Sequence[Any]) -> bool:
    if torch.Tag.data_dependent_output in op.tags:
        return True
    if op is torch.ops.aten.index.Tensor:  # tagged for masks, used mostly with integers
        return any(index is not None and index.dtype in _MASKS for index in args[1])
    return torch.Tag.dynamic_output_shape in op.tags


def new_symbols(graph: fx.Graph) -> Iterator[tuple[fx.Node, dict[str, int | None]]]:
    """The nodes that bring data-dependent symbols, each with their names and the dimension that shows them (None: the
    node is itself the number)."""
    known: set[str] = set()
    for node in graph.nodes:
        names = data_symbols_of(node.meta.get("val")) - known
        if names and node.op == "call_function":
            known |= names
            yield node, {name: _dimension(node.meta["val"], name) for name in sorted(names)}


def _dimension(value: Any, name: str) -> int | None:
    first = value[0] if isinstance(value, (tuple, list)) else value
    if not isinstance(first, torch.Tensor):
        return None
    return next(dim for dim, size in enumerate(first.shape) if plain_symbol(size) == name)


def is_real(tensor: torch.Tensor) -> bool:
    """Whether a tensor has data to look at."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def match(graph: fx.Graph, observed: Sequence[Observed]) -> dict[str, int] | None:
    """The values of a joint graph's symbols, from what the same forward was observed to give, op by op in order.

    None where graph and observation do not go together.
    """
    remaining = list(observed)
    values: dict[str, int] = {}
    for node, symbols in new_symbols(graph):
        while remaining and remaining[0].op != str(node.target):
            remaining.pop(0)
        if not remaining:
            return None
        result = remaining.pop(0).result
        for name, dimension in symbols.items():
            size = result if dimension is None else result[dimension]  # type: ignore[index]
            assert isinstance(size, int)
            values[name] = size
    return values


def guard_sizes(forward: fx.GraphModule, allowed: Mapping[str, int]) -> None:
    """Have a forward graph stop with `SizeOutgrown` where a size is above what is allowed. Edits the graph."""
    for node, symbols in list(new_symbols(forward.graph)):
        for name, dimension in symbols.items():
            if name in allowed:
                with forward.graph.inserting_after(node):
                    forward.graph.call_function(check_size, (node, dimension, allowed[name]))


@fx.node.has_side_effect
def check_size(value: Any, dimension: int | None, most: int) -> None:
    """Raise `SizeOutgrown` if the number, or the tensor's size, is above `most`."""
    first = value[0] if isinstance(value, (tuple, list)) else value
    size = first if dimension is None else first.shape[dimension]
    if size > most:
        raise SizeOutgrown(f"{size} instead of at most {most}")
