"""A step as files for other tools: trace viewers, Graphviz and Netron, and PyTorch's memory visualiser."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from memopt.account.breakdown import WORKSPACE
from memopt.planning.plan import Plan
from memopt.planning.plan_views import Format
from memopt.show.memory_snapshot import memory_snapshot
from memopt.show.step import Step, StepMemory
from memopt.show.step_of_plan import step_of
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
        path.write_bytes(pickle.dumps(memory_snapshot(whole, whole.planned), protocol=_PROTOCOL))
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
