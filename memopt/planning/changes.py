"""One change of a plan to one operator, as data (`Change`), and the facts of a graph's nodes from which it is made."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from passes.graphs.graph_text import format_target
from passes.graphs.node_facts import module_path

DTYPE, CAST, FUSED, CHUNKED, REWRITTEN, REMOVED = "dtype", "cast", "fused", "chunked", "rewritten", "removed"
SAVED, RECOMPUTED, OFFLOADED, FREED = "saved as", "recomputed", "offloaded", "freed early"
IN_PLACE, KEPT, MOVED = "in place", "kept gathered", "moved"
KINDS = (DTYPE, CAST, FUSED, CHUNKED, REWRITTEN, REMOVED, SAVED, RECOMPUTED, OFFLOADED, FREED, IN_PLACE, KEPT, MOVED)
"""The kinds of changes, in the order in which the changes of a module are shown."""


@dataclass(frozen=True)
class Change:
    """A change of one kind (one of `KINDS`) to one operator."""

    kind: str
    op: str
    """Name of the node: in the operator graph for changes that passes made there, else in the captured joint graph."""
    module: str
    """Path of the module that called the operator, or whose call it differentiates; "" outside of submodules."""
    operator: str
    """The operator's name without namespace and overload: "addmm"."""
    number: int = 0
    """Position among the calls of the same operator by the same line in the same module, for comparing blocks."""
    detail: str = ""
    """What the change is, beyond its kind: the dtypes, or the operators that it replaces; part of `meaning`."""
    reason: str = ""
    readers: tuple[str, ...] = ()
    """Operators in whose backward a recomputed or fetched value is first read."""
    nbytes: int = 0
    """Bytes that are recomputed, copied to the host, or saved in fewer bits."""
    seconds: float = 0.0
    """Seconds of all recomputations of the operator, by the time model."""
    times: int = 0
    """How often the operator runs beyond the first time, or how often its value is offloaded."""
    source: str = ""
    """The line of the user's code that called the operator, as "file:line"; "" where none is known."""
    code: str = ""
    """The text of that line."""
    region: int = 0
    """Number of the captured region."""
    sign: str = ""
    """Between two plans: "+" for a change that only the later makes, "-" for one that only the earlier makes."""

    @property
    def meaning(self) -> tuple[object, ...]:
        """What identifies the change: equal in two plans for the same change of the same operator."""
        return self.kind, self.module, self.operator, self.code, self.number, self.detail, self.times, self.region


def between(earlier: tuple[Change, ...], later: tuple[Change, ...]) -> tuple[Change, ...]:
    """The changes that only one of two plans makes: those of `earlier` with the sign "-", those of `later` with "+"."""
    old, new = ({change.meaning for change in changes} for changes in (earlier, later))
    gone = (replace(change, sign="-") for change in earlier if change.meaning not in new)
    come = (replace(change, sign="+") for change in later if change.meaning not in old)
    return (*gone, *come)


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


class GraphFacts:
    """The nodes of one graph by name. `change` makes a `Change` of a node, with what the graph tells about it."""

    def __init__(self, graph: fx.Graph, region: int) -> None:
        self.region = region
        self.nodes = {node.name: node for node in graph.nodes}
        self.modules = tuple(dict.fromkeys(module_path(node) for node in graph.nodes if node.op == "call_function"))
        self._number: dict[str, int] = {}
        self._line: dict[str, str] = {}
        calls: Counter[tuple[str, str, str]] = Counter()
        for node in graph.nodes:
            line = self._line[node.name] = source_line(node)
            call = module_path(node), operator_name(node), line
            self._number[node.name] = calls[call]
            calls[call] += 1

    def line(self, node: fx.Node) -> tuple[str, str]:
        """The line of the user's code that called a node, as "file:line" and as text; both "" where none is known."""
        source = self._line[node.name]
        path, _, line = source.rpartition(":")
        return source, linecache.getline(path, int(line)).strip() if source else ""

    def change(self, kind: str, node: fx.Node, **fields: Any) -> Change:
        """The change `kind` of a node, with the node's names, module and source line; `fields` are further fields."""
        source, code = self.line(node)
        named = node.name, module_path(node), operator_name(node), self._number[node.name]
        return Change(kind, *named, source=source, code=code, region=self.region, **fields)


def operator_name(node: fx.Node) -> str:
    """The name of a node's operator without namespace and overload ("addmm"), or of an input itself."""
    if node.op != "call_function":
        return node.name
    name = format_target(node.target)
    return name.split(".")[1] if "." in name else name


def source_line(node: fx.Node) -> str:
    """The innermost line that called the node's operator, outside of torch if possible: "file:line"; or ""."""
    return _innermost(node.meta.get("stack_trace") or "")


@lru_cache(maxsize=1024)
def _innermost(trace: str) -> str:
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return ":".join((own or frames)[-1]) if frames else ""
