"""What a reader wants to know of a graph's nodes: module, source line, and position among the module's calls."""

from __future__ import annotations

import linecache
import os
import re
from collections import Counter
from typing import Any

import torch
from torch import fx

from memopt.planning.change import Change
from passes.graphs.graph_text import format_target
from passes.graphs.node_facts import module_path

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


class GraphFacts:
    """The nodes of one graph by name, and changes of them with everything but the kind filled in."""

    def __init__(self, graph: fx.Graph, region: int) -> None:
        self.region = region
        self.nodes = {node.name: node for node in graph.nodes}
        self.modules = tuple(dict.fromkeys(module_path(node) for node in graph.nodes if node.op == "call_function"))
        self._number: dict[str, int] = {}
        self._line: dict[str, str] = {}
        lines: dict[str, str] = {}
        calls: Counter[tuple[str, str, str]] = Counter()
        for node in graph.nodes:
            trace = node.meta.get("stack_trace") or ""
            if trace not in lines:
                lines[trace] = _user_line(trace)
            self._line[node.name] = lines[trace]
            call = module_path(node), operator_name(node), lines[trace]
            self._number[node.name] = calls[call]
            calls[call] += 1

    def line(self, node: fx.Node) -> tuple[str, str]:
        """The line of the user's code that called a node, as "file:line" and as text; both "" where none is known."""
        source = self._line[node.name]
        path, _, line = source.rpartition(":")
        return source, linecache.getline(path, int(line)).strip() if source else ""

    def change(self, kind: str, node: fx.Node, **fields: Any) -> Change:
        """A change of a kind to a node, with further fields of `Change`."""
        source, code = self.line(node)
        return Change(
            kind,
            node.name,
            module_path(node),
            operator_name(node),
            self._number[node.name],
            source=source,
            code=code,
            region=self.region,
            **fields,
        )


def operator_name(node: fx.Node) -> str:
    """`addmm` for a call of `aten.addmm.default`; the name of the node for inputs."""
    if node.op != "call_function":
        return node.name
    name = format_target(node.target)
    return name.split(".")[1] if "." in name else name


def _user_line(trace: str) -> str:
    """The innermost line outside of torch in a stack trace, as "file:line"; "" for an empty trace."""
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return ":".join((own or frames)[-1]) if frames else ""
