"""Where, when and by which command a figure was measured, and how its result file is written."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch

LINE = 2000
"""Characters of a record that is written on one line."""


def stamp() -> dict[str, Any]:
    """Return the date, the machine, the version of torch and the command; the card too where there is one,
    or a stand-in for one."""
    machine: dict[str, Any] = {
        "processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()
    }  # fmt: skip
    if torch.cuda.is_available():
        stand_in = hasattr(ctypes.CDLL(None), "memopt_card_stand_in")  # docs/card.md
        machine["gpu"] = torch.cuda.get_device_name() + " (a stand-in)" * stand_in
    command = " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(shlex.quote, sys.argv[1:])])
    return {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__, "command": command}


def write_result(path: Path, document: dict[str, Any]) -> None:
    """Write a result file as JSON: one record on a line, numbers to six significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_lines(_rounded(document))) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    """Return `value` with every float in it rounded to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _lines(value: Any, indent: int = 0, name: str = "") -> Iterator[str]:
    """Yield the lines of `value` as JSON: what fits in a line is one, what does not has a line for each item; a list of
    names or numbers is filled into lines."""
    start = " " * indent + (json.dumps(name) + ": " if name else "")
    text = json.dumps(value, ensure_ascii=False)
    if not value or not isinstance(value, (list, dict)) or (indent and len(start) + len(text) <= LINE):
        yield start + text
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield start + opening
    if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
        margin = " " * (indent + 1)
        yield from _filled((json.dumps(item, ensure_ascii=False) for item in value), margin)
        yield " " * indent + closing
        return
    items = list(value.items()) if isinstance(value, dict) else [("", item) for item in value]
    for number, (key, item) in enumerate(items, 1):
        *lines, last = _lines(item, indent + 1, key)
        yield from lines
        yield last + ("," if number < len(items) else "")
    yield " " * indent + closing


def _filled(items: Iterable[str], margin: str) -> Iterator[str]:
    """Yield lines of items with commas between them, as many on each as fit."""
    line = margin
    for item in items:
        if line != margin and len(line) + len(item) + 2 > LINE:
            yield f"{line},"
            line = margin
        line += item if line == margin else f", {item}"
    yield line


def _processor() -> str:
    """Return the processor's name, `Intel(R) Xeon(R) …` on Linux; elsewhere the one that Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
