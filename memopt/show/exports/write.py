"""Writes a step into a file of another tool's format."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from memopt.planning.plan_views import Format
from memopt.show.exports.chrome_trace import chrome_trace
from memopt.show.exports.graphviz import graphviz
from memopt.show.exports.memory_snapshot import memory_snapshot
from memopt.show.step import Step

if TYPE_CHECKING:
    from networkx import DiGraph

FORMATS: tuple[Format, ...] = get_args(Format)
_BY_NAME: dict[str, Format] = {
    ".pickle": "snapshot",
    ".pkl": "snapshot",
    ".json": "trace",
    ".dot": "dot",
    ".gv": "dot",
}
# The highest protocol that the visualiser reads.
_PROTOCOL = 4


def format_of(path: Path, given: str | None) -> Format:
    """The format that is asked for, else the one of the file's name. Raises `ValueError` for another."""
    if given is None:
        if path.suffix.lower() not in _BY_NAME:
            raise ValueError(f"no format goes with the name {path.name!r}: end it in {', '.join(_BY_NAME)}")
        return _BY_NAME[path.suffix.lower()]
    for one in FORMATS:
        if given == one:
            return one
    raise ValueError(f"there is no format {given!r}; choose one of {', '.join(FORMATS)}")


def write_export(path: Path, given: str | None, step: Callable[[], Step], graph: Callable[[], DiGraph]) -> None:
    """Write a file in the format given or in that of its name, from the step or from the joint graph of a plan.

    Raises `ValueError` for another format, `OSError` where the file cannot be written.
    """
    chosen = format_of(path, given)
    if chosen == "snapshot":
        whole = step()
        path.write_bytes(pickle.dumps(memory_snapshot(whole, whole.planned), protocol=_PROTOCOL))
    elif chosen == "trace":
        path.write_text(json.dumps(chrome_trace(step()), separators=(",", ":")), encoding="utf-8")
    else:
        path.write_text(graphviz(graph()), encoding="utf-8")
