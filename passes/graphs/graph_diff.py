"""The difference between two graphs, as text like a unified diff."""

import bisect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch.fx import Graph, GraphModule, Node

from passes.graphs.graph_text import format_node


@dataclass(frozen=True)
class GraphDiff:
    """The difference between two graphs: node names, and the text. False, and an empty text, if there is none.

    A node is matched with the one of its name, failing that with one that makes the same call (`renamed`, as pairs of
    old and new name). Names are those of the later graph, except in `removed`.
    """

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

    `notes` are written behind the lines of the nodes of those names in the later graph, changed or not. Without
    `order`, nodes that only moved or have another name are no changes. With `among`, only these nodes of the earlier
    and of the later graph are compared.
    """
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
    """Signed lines: blank, `-` or `+`; a changed node's old and new line stand together. Without `order`, nodes that
    moved stand where they are in the later graph only."""
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
    hunk: list[str] = []
    start = (1, 1)
    for index, (sign, line) in enumerate(steps):
        if index in shown:
            start = start if hunk else (old_line, new_line)
            hunk.append(f"{sign} {line}")
        old_line += sign != "+"
        new_line += sign != "-"
        if hunk and index + 1 not in shown:
            yield f"@@ -{start[0]},{old_line - start[0]} +{start[1]},{new_line - start[1]} @@"
            yield from hunk
            hunk = []
