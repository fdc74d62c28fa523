"""Graphs as text, one line a node, and the difference between two graphs, as text like a unified diff.

The printer is our own, so that goldens do not change with torch's.
"""

import bisect
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.graphs.node_facts import OPERATOR_OVERLOAD

_KINDS = (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i"), ("bool", "b8"))


def format_graph(graph: Graph | GraphModule) -> str:
    """The graph as text, one line a node, without a final newline."""
    return "\n".join(map(format_node, (graph.graph if isinstance(graph, GraphModule) else graph).nodes))


def format_node(node: Node, name_of: Callable[[Node], str] = lambda node: node.name) -> str:
    """One line: `add: f32[2, 64] = aten.add.Tensor(view, primals_3, alpha=2)`.

    `name_of` gives each node's name, so that a diff can print one graph in the names of another."""
    if node.op == "output":
        return f"return {format_argument(node.args[0], name_of)}"
    head = f"{name_of(node)}: {format_value(node.meta['val'])}" if "val" in node.meta else name_of(node)
    if node.op == "placeholder":
        return f"input {head}"
    return f"{head} = {_format_call(node, name_of)}"


def _format_call(node: Node, name_of: Callable[[Node], str]) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    arguments = [format_argument(argument, name_of) for argument in node.args]
    if node.target is operator.getitem and len(arguments) == 2:
        return f"{arguments[0]}[{arguments[1]}]"
    arguments += [f"{name}={format_argument(keyword, name_of)}" for name, keyword in node.kwargs.items()]
    called = format_target(node.target) if node.op == "call_function" else f"{node.op}.{node.target}"
    return f"{called}({', '.join(arguments)})"


def format_target(target: Any) -> str:
    """A call's target: `aten.addmm`, `aten.add.Tensor`, `operator.mul`, `run_and_save_rng_state`."""
    if isinstance(target, OPERATOR_OVERLOAD):
        return str(target).removesuffix(".default")
    name = str(getattr(target, "__name__", target))
    return f"operator.{name}" if target is getattr(operator, name, None) else name


def format_value(value: object) -> str:
    """A value's type: `f32[2, 64]`, `Sym(s0)`, `(f32[2], None)`."""
    if isinstance(value, torch.Tensor):
        return f"{format_dtype(value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(format_value(element) for element in value)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"Sym({value})"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    return type(value).__name__


def format_dtype(dtype: torch.dtype) -> str:
    """A dtype in short: `f32`, `bf16`, `i64`, `b8`, `u8`, `f8_e4m3fn`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in _KINDS:
        if name.startswith(long):
            return re.sub(r"^(f\d)(e\d)", r"\1_\2", short + name.removeprefix(long).replace("_", ""))
    return name


def format_argument(argument: Any, name_of: Callable[[Node], str] = lambda node: node.name) -> str:
    """An argument as it is written in a call: nodes by name, dtypes in short, nested tuples and lists in brackets."""
    if isinstance(argument, Node):
        return name_of(argument)
    if isinstance(argument, (tuple, list)):
        inner = ", ".join(format_argument(element, name_of) for element in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{name}: {format_argument(entry, name_of)}" for name, entry in argument.items()) + "}"
    if isinstance(argument, slice):
        return ":".join(
            "" if bound is None else format_argument(bound, name_of)
            for bound in ((argument.start, argument.stop) + ((argument.step,) if argument.step is not None else ()))
        )
    if isinstance(argument, torch.dtype):
        return format_dtype(argument)
    if isinstance(argument, torch.Tensor):
        return format_value(argument)
    if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
        return str(argument).removeprefix("torch.")
    if callable(argument):
        return format_target(argument)
    return repr(argument)


@dataclass(frozen=True)
class GraphDiff:
    """The difference between two graphs: node names, and a text. If there is none, its truth value is False.

    A node of one graph is matched with the node of the same name in the other; failing that, with one that makes the
    same call (`renamed`, as pairs of old and new name). Names are those of the later graph, except in `removed`."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    moved: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    text: str

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.moved or self.renamed)

    def summary(self) -> str:
        """`3 added, 1 removed`, or `no change`."""
        counts = {kind: len(getattr(self, kind)) for kind in ("added", "removed", "changed", "moved", "renamed")}
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no change"

    def __str__(self) -> str:
        return self.text


def diff_graphs(
    before: Graph | GraphModule,
    after: Graph | GraphModule,
    *,
    context: int = 2,
    notes: Mapping[str, str] = MappingProxyType({}),
    order: bool = True,
    among: tuple[Collection[Node], Collection[Node]] | None = None,
) -> GraphDiff:
    """Compares two graphs node by node; the text shows `context` unchanged nodes around each change.

    `notes` maps names of nodes in the later graph to texts that are written after their lines, changed or not. Without
    `order`, nodes that only moved or have another name are no changes. With `among`, only these nodes of the earlier
    and of the later graph are compared."""
    old, new = (list((graph.graph if isinstance(graph, GraphModule) else graph).nodes) for graph in (before, after))
    name_of = _match(old, new)
    # Both graphs are printed with the names of the later one, so that a renamed input does not change its users.
    kept_old, kept_new = map(set, among or (old, new))
    old_lines = {name_of[node]: format_node(node, name_of.__getitem__) for node in old if node in kept_old}
    new_lines = {node.name: format_node(node) for node in new if node in kept_new}
    in_place = _longest_common_order([name for name in old_lines if name in new_lines], list(new_lines))
    shared = [name for name in new_lines if name in old_lines]
    diff = GraphDiff(
        added=tuple(name for name in new_lines if name not in old_lines),
        removed=tuple(name for name in old_lines if name not in new_lines),
        changed=tuple(name for name in shared if old_lines[name] != new_lines[name]),
        moved=tuple(name for name in shared if order and name not in in_place),
        renamed=tuple((node.name, name_of[node]) for node in old if order and node.name != name_of[node]),
        text="",
    )
    steps = list(_steps(old_lines, new_lines, in_place, notes, order=order))
    return replace(diff, text="\n".join([f"# {diff.summary()}", *_hunks(steps, context)])) if diff else diff


def _match(old: list[Node], new: list[Node]) -> dict[Node, str]:
    """Returns for old nodes their name in the new graph; a removed node keeps its own, which no new node has."""

    def call(line: str) -> str:
        return line.partition(": ")[2]

    new_names = {node.name for node in new}
    old_names = {node.name for node in old}
    unmatched: dict[str, list[str]] = {}
    for node in reversed(new):
        if node.name not in old_names:
            unmatched.setdefault(call(format_node(node)), []).append(node.name)
    name_of: dict[Node, str] = {}
    for node in old:
        candidates = unmatched.get(call(format_node(node, lambda argument: name_of.get(argument, argument.name))))
        name_of[node] = candidates.pop() if node.name not in new_names and candidates else node.name
    return name_of


def _longest_common_order(old: list[str], new: list[str]) -> set[str]:
    """The largest set of names that stand in the same order in both lists (names occur once): the rest has moved."""
    position = {name: index for index, name in enumerate(old)}
    ends: list[int] = []
    last: list[str] = []
    previous: dict[str, str | None] = {}
    for name in new:
        if name not in position:
            continue
        length = bisect.bisect_left(ends, position[name])
        previous[name] = last[length - 1] if length else None
        ends[length : length + 1] = [position[name]]
        last[length : length + 1] = [name]
    found: set[str] = set()
    walk = last[-1] if last else None
    while walk is not None:
        found.add(walk)
        walk = previous[walk]
    return found


def _steps(
    old: dict[str, str], new: dict[str, str], in_place: set[str], notes: Mapping[str, str], *, order: bool
) -> Iterator[tuple[str, str]]:
    """Yields the lines of a diff, each after its sign: blank, `-` or `+`. The old and new line of a changed node stand
    together. Without `order`, nodes that moved stand where they are in the later graph only."""
    moved = set() if order else {name for name in new if name in old and name not in in_place}
    remaining = iter([(name, line) for name, line in old.items() if name not in moved])
    for name, line in new.items():
        noted = f"{line}  # {notes[name]}" if name in notes else line
        if name in moved:
            yield from [(" ", noted)] if old[name] == line else [("-", old[name]), ("+", noted)]
            continue
        if name not in in_place:
            yield "+", noted
            continue
        for old_name, old_line in remaining:
            if old_name != name:
                yield "-", old_line
                continue
            yield from [(" ", noted)] if old_line == line else [("-", old_line), ("+", noted)]
            break
    yield from (("-", line) for _, line in remaining)


def _hunks(steps: list[tuple[str, str]], context: int) -> Iterator[str]:
    shown = {
        near
        for index, (sign, _) in enumerate(steps)
        if sign != " " or "  # " in steps[index][1]
        for near in range(max(0, index - context), min(len(steps), index + context + 1))
    }
    old_line = new_line = 1
    for is_shown, pairs in groupby(enumerate(steps), lambda pair: pair[0] in shown):
        lines = [step for _, step in pairs]
        olds, news = (sum(sign != other for sign, _ in lines) for other in "+-")
        if is_shown:
            yield f"@@ -{old_line},{olds} +{new_line},{news} @@"
            yield from (f"{sign} {line}" for sign, line in lines)
        old_line, new_line = old_line + olds, new_line + news
