"""A step as a Chrome trace, for ui.perfetto.dev and chrome://tracing: operators, modules, copies, memory.

The format is the Trace Event Format's JSON. Times are by the time model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from memopt.account.breakdown import WORKSPACE
from memopt.show.step import Step, StepMemory

_OPERATORS, _MODULES, _OUT, _BACK = 1, 2, 3, 4
_TRACKS = {_OPERATORS: "operators", _MODULES: "modules", _OUT: "copies to the host", _BACK: "copies from the host"}

Event = dict[str, Any]


def chrome_trace(step: Step) -> dict[str, Any]:
    """The trace of a step: one process as planned, one with nothing recomputed."""
    events: list[Event] = []
    for process, (name, memory) in enumerate((("planned", step.planned), ("nothing recomputed", step.plain)), start=1):
        events.append(_named("process_name", name, process))
        used = (_OPERATORS, _MODULES, *((_OUT, _BACK) if memory.copies else ()))
        events += (_named("thread_name", _TRACKS[track], process, track) for track in used)
        events += ({**event, "pid": process} for event in _events(step, memory))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(step: Step, memory: StepMemory) -> Iterator[Event]:
    yield from _operators(step, memory)
    yield from _modules(step, memory)
    for copy in memory.copies:
        track = _OUT if copy.out else _BACK
        yield _slice(step.ops[copy.op].name, "copy", track, copy.start, copy.end, {"bytes": copy.nbytes})
    yield from _counters(memory)


def _operators(step: Step, memory: StepMemory) -> Iterator[Event]:
    for moment, now in enumerate(memory.evaluations):
        op = step.ops[now.op]
        half = "recomputed" if now.again else "forward" if moment < memory.boundary else "backward"
        facts: dict[str, Any] = {
            "operator": op.operator,
            "module": op.module,
            "value": op.value,
            "fate": op.fate,
            "source": op.source,
        }
        facts = {**facts, "bytes": op.nbytes, "live bytes": memory.live_bytes[moment]}
        yield _slice(op.name, half, _OPERATORS, now.start, now.start + op.seconds, facts)


def _modules(step: Step, memory: StepMemory) -> Iterator[Event]:
    """Slices of modules within modules: from the first to the last of neighbouring operators that a module runs."""
    opened: list[tuple[str, float]] = []
    end = 0.0
    for now in memory.evaluations:
        op = step.ops[now.op]
        path = op.module.split(".") if op.module else []
        same = 0
        while same < min(len(opened), len(path)) and opened[same][0] == path[same]:
            same += 1
        yield from _closed(opened, same, end)
        opened += ((part, now.start) for part in path[same:])
        end = now.start + op.seconds
    yield from _closed(opened, 0, end)


def _closed(opened: list[tuple[str, float]], left: int, end: float) -> Iterator[Event]:
    """Close all but the first `left` open modules, the inner ones first."""
    while len(opened) > left:
        path = ".".join(part for part, _ in opened)
        name, start = opened.pop()
        yield _slice(name, "module", _MODULES, start, end, {"module": path})


def _counters(memory: StepMemory) -> Iterator[Event]:
    """The bytes held at the start of each evaluation, by row of the account."""
    rows = Counter({row: nbytes for row, nbytes in memory.resident.items() if nbytes > 0})
    rows += Counter({kept.kind: 0 for kept in memory.ranges})
    kinds = dict.fromkeys([*rows, *(kept.kind for kept in memory.ranges), WORKSPACE])
    born: dict[int, Counter[str]] = {}
    gone: dict[int, Counter[str]] = {}
    for kept in memory.ranges:
        born.setdefault(kept.first, Counter())[kept.kind] += kept.nbytes
        gone.setdefault(kept.last + 1, Counter())[kept.kind] += kept.nbytes
    for moment, now in enumerate(memory.evaluations):
        rows.update(born.get(moment, {}))
        rows.subtract(gone.get(moment, {}))
        held = {kind: rows[kind] for kind in kinds} | {WORKSPACE: now.workspace_bytes}
        yield {"ph": "C", "name": "memory", "ts": _micros(now.start), "args": held}
    at_end = {**dict.fromkeys(kinds, 0), **memory.optimizer}
    yield {"ph": "C", "name": "memory", "ts": _micros(memory.seconds), "args": at_end}


def _slice(name: str, category: str, track: int, start: float, end: float, facts: dict[str, Any]) -> Event:
    span = {"ts": _micros(start), "dur": _micros(end - start)}
    return {"ph": "X", "name": name, "cat": category, "tid": track, **span, "args": facts}


def _named(what: str, name: str, process: int, track: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
