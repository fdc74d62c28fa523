"""A step as files for other tools: trace viewers, Graphviz and Netron, and PyTorch's memory visualiser."""

from __future__ import annotations

import json
import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from memopt.account.account import WORKSPACE
from memopt.account.caching_allocator import CachingAllocator
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import Format
from memopt.show.step import Step, StepMemory, step_of
from memopt.units import duration, micros, size

if TYPE_CHECKING:
    from networkx import DiGraph

_FORMATS: tuple[Format, ...] = get_args(Format)
_BY_NAME: dict[str, Format] = {
    ".pickle": "snapshot", ".pkl": "snapshot", ".json": "trace", ".dot": "dot", ".gv": "dot",
}  # fmt: skip
_PROTOCOL = 4  # the highest protocol that the visualiser reads
_OPERATORS, _MODULES, _OUT, _BACK = 1, 2, 3, 4
_TRACKS = {_OPERATORS: "operators", _MODULES: "modules", _OUT: "copies to the host", _BACK: "copies from the host"}
Event = dict[str, Any]
_COLOURS = {
    "saved": "#cfe0f2", "recomputed": "#f8dcc0", "offloaded": "#f4cfdc",
    "output": "#e3d7ef", "gradient": "#d5c6e6", "temporary": "#d5ebe4",
}  # fmt: skip
_FIRST_ADDRESS = 0x7F00_0000_0000
_PAGE = 2 * 1024**2
_CATEGORIES = frozenset({"parameters", "optimizer state", "gradients", "buffers", "inputs"})
"""Rows of the account that are categories in a snapshot; all others are "unknown", which the visualiser expects."""
_NOTHING: dict[str, Any] = {"size": 0, "frames": []}
"""A free block's owner."""
_LEFT_OUT = frozenset({"input", "alias"})
_ESCAPED = str.maketrans({char: f"\\{char}" for char in '\\"{}|<>'})


def format_of(path: Path, given: str | None) -> Format:
    """The format `given`, else that of the file's ending. Raises `ValueError` for an unknown one."""
    if given is None:
        if path.suffix.lower() not in _BY_NAME:
            raise ValueError(f"no format goes with the name {path.name!r}: end it in {', '.join(_BY_NAME)}")
        return _BY_NAME[path.suffix.lower()]
    if given not in _FORMATS:
        raise ValueError(f"there is no format {given!r}; choose one of {', '.join(_FORMATS)}")
    return given


def export(plan: Plan, path: str | Path, format: str | None) -> None:
    """Write a plan's step to a file for another tool (`Plan.export`)."""
    write_export(Path(path), format, lambda: step_of(plan), plan.networkx)


def write_export(path: Path, given: str | None, step: Callable[[], Step], graph: Callable[[], DiGraph]) -> None:
    """Write a file in the format `given`, or in that of its name, from the step or the joint graph that `step` and
    `graph` make. Raises `ValueError` for an unknown format or ending."""
    chosen = format_of(path, given)
    if chosen == "snapshot":
        whole = step()
        path.write_bytes(pickle.dumps(_snapshot(whole, whole.planned), protocol=_PROTOCOL))
    elif chosen == "trace":
        path.write_text(json.dumps(chrome_trace(step()), separators=(",", ":")), encoding="utf-8")
    else:
        path.write_text("\n".join(("digraph plan {", *_lines(graph()), "}", "")), encoding="utf-8")


def chrome_trace(step: Step) -> dict[str, Any]:
    """A step as a trace in Chrome's format: one process for the planned step, one for that with nothing recomputed."""
    events: list[Event] = []
    for process, (name, memory) in enumerate((("planned", step.planned), ("nothing recomputed", step.plain)), start=1):
        events.append(_named("process_name", name, process))
        used = (_OPERATORS, _MODULES, *((_OUT, _BACK) if memory.copies else ()))
        events += (_named("thread_name", _TRACKS[track], process, track) for track in used)
        events += ({**event, "pid": process} for event in _events(step, memory))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(step: Step, memory: StepMemory) -> Iterator[Event]:
    for moment, now in enumerate(memory.evaluations):
        op = step.ops[now.op]
        half = "recomputed" if now.again else "forward" if moment < memory.boundary else "backward"
        facts = {name: getattr(op, name) for name in ("operator", "module", "value", "fate", "source")}
        facts |= {"bytes": op.nbytes, "live bytes": memory.live_bytes[moment]}
        yield _slice(op.name, half, _OPERATORS, now.start, now.start + op.seconds, facts)
    yield from _modules(step, memory)
    for copy in memory.copies:
        track = _OUT if copy.out else _BACK
        yield _slice(step.ops[copy.op].name, "copy", track, copy.start, copy.end, {"bytes": copy.nbytes})
    # the bytes held at the start of each evaluation and during the optimizer's step, by row of the account
    resident = (row for row, nbytes in memory.resident.items() if nbytes > 0)
    kinds = dict.fromkeys([*resident, *(kept.kind for kept in memory.ranges), WORKSPACE])
    *during, at_end = memory.held()
    held = [{kind: rows.get(kind, 0) for kind in kinds} for rows in during]
    starts = (*(now.start for now in memory.evaluations), memory.seconds)
    for start, rows in zip(starts, (*held, {**dict.fromkeys(kinds, 0), **at_end}), strict=True):
        yield {"ph": "C", "name": "memory", "ts": micros(start), "args": rows}


def _modules(step: Step, memory: StepMemory) -> Iterator[Event]:
    """Slices for modules, nested as these are, each over neighbouring operators that the module runs."""
    runs = [(step.ops[now.op].module, now.start, now.start + step.ops[now.op].seconds) for now in memory.evaluations]
    opened: list[tuple[str, float]] = []
    end = 0.0
    for module, start, stop in (*runs, ("", 0.0, 0.0)):
        path = module.split(".") if module else []
        same = 0
        while same < min(len(opened), len(path)) and opened[same][0] == path[same]:
            same += 1
        while len(opened) > same:  # the inner ones first
            inner = {"module": ".".join(part for part, _ in opened)}
            name, begun = opened.pop()
            yield _slice(name, "module", _MODULES, begun, end, inner)
        opened += ((part, start) for part in path[same:])
        end = stop


def _slice(name: str, category: str, track: int, start: float, end: float, facts: dict[str, Any]) -> Event:
    span = {"ts": micros(start), "dur": micros(end - start)}
    return {"ph": "X", "name": name, "cat": category, "tid": track, **span, "args": facts}


def _named(what: str, name: str, process: int, track: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _lines(graph: DiGraph) -> Iterator[str]:
    """The lines of a directed graph for Graphviz, from that of `Plan.networkx`. Inputs and views are left out, so that
    Graphviz can lay it out: what reads a view gets an edge from the operator whose memory the view shows."""
    yield "  rankdir=TB; nslimit=1; nslimit1=1; mclimit=0.2; splines=line;"
    yield '  node [shape=record, style=filled, fillcolor="#ffffff", fontname="Helvetica", fontsize=10];'
    for name, facts in graph.nodes(data=True):
        if facts["fate"] not in _LEFT_OUT:
            colour = _COLOURS.get(facts["fate"], "#ffffff")
            source = f', tooltip="{_escaped(facts["source"])}"' if facts["source"] else ""
            yield f'  "{_escaped(name)}" [label="{_label(name, facts)}", fillcolor="{colour}"{source}];'
    for reader, makers in _makers(graph).items():
        if graph.nodes[reader]["fate"] not in _LEFT_OUT:
            yield from (f'  "{_escaped(maker)}" -> "{_escaped(reader)}";' for maker in makers)


def _makers(graph: DiGraph) -> dict[str, tuple[str, ...]]:
    """For each node, the nodes shown that it reads, directly or through nodes that are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for name in graph:  # in the order of the graph, in which a node comes after those that it reads
        read: dict[str, None] = {}
        for before in graph.predecessors(name):
            shown = graph.nodes[before]["fate"] not in _LEFT_OUT
            read |= dict.fromkeys((before,) if shown else found.get(before, ()))
        found[name] = tuple(read)
    return found


def _label(name: str, facts: dict[str, Any]) -> str:
    kind = facts["kind"] or "account"
    rows = {
        "module": facts["module"],
        "fate": facts["fate"],
        "bytes": size(facts["bytes"]) if facts["bytes"] else "",
        "time": duration(facts["seconds"]) if facts["seconds"] else "",
        "runs": str(facts["recomputed"] + 1) if facts["recomputed"] else "",
    }
    told = "".join(f"{key}: {_escaped(value)}\\l" for key, value in rows.items() if value)
    operator = _escaped(facts["operator"].removesuffix(".default") or kind)
    return f"{{{_escaped(name)}|op_code={kind}\\l|{operator}\\l{told}}}"


def _escaped(text: str) -> str:
    return text.translate(_ESCAPED)


def _snapshot(step: Step, memory: StepMemory) -> dict[str, Any]:
    """The step in the format of `torch.cuda.memory._snapshot`: its events, then the segments with the blocks that are
    left, with gaps as on a card. The resident rows of the account come first, in a block for each module with a
    share."""
    recording = _Recording()
    for row, nbytes in memory.resident.items():
        for module, share in step.shares(row, nbytes):
            name = f"{row} of {module}" if module else row
            recording.allocate((row, module), share, row if row in _CATEGORIES else "unknown", [_frame(name)])
    born, dying = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for number, kept in enumerate(memory.ranges):
        born[kept.first].append(number)
        dying[kept.last].append(number)
    last = len(memory.evaluations) - 1
    for moment, now in enumerate(memory.evaluations):
        recording.micros = round(now.start * 1e6)
        for number in born[moment]:
            kept = memory.ranges[number]
            recording.allocate(number, kept.nbytes, kept.kind, _frames(step, kept.op))
        recording.allocate(WORKSPACE, now.workspace_bytes, WORKSPACE, _frames(step, now.op))
        recording.free(WORKSPACE)
        if moment < last:
            for number in dying[moment]:
                recording.free(number)
    return recording.snapshot()


class _Recording:
    """The allocations and frees of a planned step, at the addresses of the model of torch's allocator."""

    def __init__(self) -> None:
        self.micros = 0
        self.events: list[dict[str, Any]] = []
        self._allocator = CachingAllocator()
        self._live: dict[Hashable, dict[str, Any]] = {}

    def allocate(self, key: Hashable, nbytes: int, category: str, frames: list[dict[str, Any]]) -> None:
        """Record an allocation, which `free` finds by its `key`. Does nothing for 0 bytes."""
        if nbytes > 0:
            address = self._allocator.malloc(nbytes)
            self._live[key] = {"addr": address, "size": nbytes, "stream": 0, "category": category, "frames": frames}
            self._add("alloc", self._live[key])

    def free(self, key: Hashable) -> None:
        """Record that a block is freed, if it was allocated."""
        block = self._live.pop(key, None)
        if block is not None:
            self._allocator.free(block["addr"])
            self._add("free_requested", block)
            self._add("free_completed", block)

    def snapshot(self) -> dict[str, Any]:
        """The events, and the segments as they are after them. Addresses are changed so that the segments follow each
        other closely: the visualiser reads them as floating-point numbers, too coarse for the allocator's own."""
        owned = {block["addr"]: block for block in self._live.values()}
        starts: list[int] = []
        """The allocator's addresses of the segments."""
        segments: list[dict[str, Any]] = []
        end, base = -1, _FIRST_ADDRESS
        for address, nbytes, free in sorted(self._allocator.blocks()):
            if address != end:
                base += -(-segments[-1]["total_size"] // _PAGE) * _PAGE if segments else 0
                starts.append(address)
                segments.append(_segment(base))
            segment, owner, end = segments[-1], owned.get(address, _NOTHING), address + nbytes
            segment["total_size"] += nbytes
            segment["allocated_size"] += 0 if free else nbytes
            segment["active_size"] = segment["allocated_size"]
            segment["requested_size"] += owner["size"]
            block = {"address": base + address - starts[-1], "size": nbytes, "requested_size": owner["size"]}
            state = "inactive" if owner is _NOTHING else "active_allocated"
            segment["blocks"].append({**block, "state": state, "frames": owner["frames"]})
        for event in self.events:
            at = bisect_right(starts, event["addr"]) - 1
            event["addr"] += segments[at]["address"] - starts[at]
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": {}}

    def _add(self, action: str, block: dict[str, Any]) -> None:
        self.events.append({"action": action, **block, "time_us": self.micros})


def _segment(address: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), 0)
    return {"device": 0, "address": address, **sizes, "stream": 0, "segment_type": "large", "frames": [], "blocks": []}


def _frames(step: Step, number: int) -> list[dict[str, Any]]:
    """The stack shown for a block: the name and module of the operator that makes it, and the user's line."""
    op = step.ops[number]
    path, _, line = op.source.rpartition(":")
    place = f"{op.name} of {op.module}" if op.module else op.name
    frames = [_frame(f"{place} {op.value}".strip())]
    return [*frames, {"name": op.code, "filename": path, "line": int(line)}] if op.source else frames


def _frame(name: str) -> dict[str, Any]:
    return {"name": name, "filename": "memopt", "line": 0}
