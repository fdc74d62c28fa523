"""Long work: reports of its progress, on a terminal in one line that is updated, elsewhere in a line for each stage;
and how often Python looks for reference cycles meanwhile."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from memopt.terminal import Column, Console, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_console = Console(stderr=True)
_log = logging.getLogger("memopt")
_LOG_SECONDS = 10.0
"""The least seconds between two lines in the log about the progress of one stage."""
_LONG_SECONDS = 1.0
"""A stage that takes fewer seconds leaves no line."""


@dataclass(eq=False)
class _Stage:
    name: str
    started: float
    said: float
    """When the latest line about its progress was written, by `time.perf_counter`."""
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage within it that has ended, by name."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


class _OfThread(threading.local):
    """The stages and the progress line of one thread."""

    def __init__(self) -> None:
        self.stages: list[_Stage] = []
        """The stages that are running, innermost last."""
        self.shown: list[tuple[Progress, TaskID]] = []
        """The progress line on the terminal and its task; empty while this thread has none."""


_own = _OfThread()
_terminal = threading.Lock()
"""Held by the thread that has the progress line: a terminal has room for one."""
_on_stderr: list[None] = []
"""An element for each `lines_on_stderr` that is active."""


@contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Context for a stage of long work; it yields a function that reports how far the stage has come, as text. On a
    terminal the outermost running stage and the innermost one share a line with the seconds so far. A stage that took a
    second or more is written with its seconds when it ends: to the log "memopt" at level INFO (shorter ones at DEBUG),
    and on a terminal for the outermost only. Reports are logged at most every ten seconds."""
    now = time.perf_counter()
    running = _Stage(name, now, now)
    _own.stages.append(running)
    try:
        with _line():
            yield lambda detail: _say(running, detail)
        _leave_line(running)
    finally:
        _own.stages.remove(running)
        _show()


def say(detail: str) -> None:
    """Report how far the innermost running stage has come; does nothing if none is running."""
    if _own.stages:
        _say(_own.stages[-1], detail)


def tell(text: str, level: int = logging.INFO) -> None:
    """Write a line to the log "memopt". From level INFO it also goes to stderr, unless that is a terminal, a `stage` or
    `lines_on_stderr` is active, or the program has set up logging or a higher level for the logger."""
    _log.log(level, "%s", text)
    heard = _log.hasHandlers() or _log.level > level or level < logging.INFO
    if not (heard or _own.stages or _on_stderr or _console.is_terminal):
        _print(text)


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Context in which lines about stages of level INFO also go to stderr, unless stderr is a terminal."""
    _on_stderr.append(None)
    try:
        yield
    finally:
        _on_stderr.pop()


def _print(text: str) -> None:
    _console.print(f"memopt: {text}", style="dim", highlight=False, markup=False, soft_wrap=True)


def _say(running: _Stage, detail: str) -> None:
    running.detail = detail
    _show()
    now = time.perf_counter()
    if now - running.said >= _LOG_SECONDS:
        running.said = now
        _write(f"{running.name}: {detail}")


def _leave_line(running: _Stage) -> None:
    """Write the line about a stage that has ended, if it took long, and add its seconds to the outermost stage's."""
    seconds = time.perf_counter() - running.started
    outer = _own.stages[0]
    if running is not outer:
        outer.parts[running.name] = outer.parts.get(running.name, 0.0) + seconds
    if seconds < _LONG_SECONDS:
        _log.debug("%s took %.1f s", running.name, seconds)
        return
    _write(f"{running.name} took {seconds:.1f} s")
    if running is outer and _console.is_terminal:
        parts = ", ".join(f"{name} {part:.1f}" for name, part in running.parts.items() if part >= _LONG_SECONDS)
        _print(f"{running.name} took {seconds:.1f} s" + (f" ({parts})" if parts else ""))


def _write(text: str) -> None:
    _log.info("%s", text)
    if _on_stderr and not _console.is_terminal:
        _print(text)


@contextmanager
def _line() -> Iterator[None]:
    """Context with the progress line, for the outermost stage on a terminal; others only update it."""
    if len(_own.stages) > 1 or not _console.is_terminal or not _terminal.acquire(blocking=False):
        _show()
        yield
        return
    text = TextColumn("memopt: {task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = SpinnerColumn(), TimeElapsedColumn(), text
    # Redirected standard output is left alone, so that what the model prints reaches its file.
    apart = sys.stdout is not None and sys.stdout.isatty()
    try:
        with Progress(*columns, console=_console, transient=True, redirect_stdout=apart) as line:
            _own.shown.append((line, line.add_task("", total=None)))
            _show()
            yield
    finally:
        _own.shown.clear()
        _terminal.release()


def _show() -> None:
    """Update the line on the terminal."""
    if _own.shown and _own.stages:
        line, task = _own.shown[0]
        # The description is markup to rich, in which a bracket would begin a tag.
        both = " · ".join(map(str, dict.fromkeys((_own.stages[0], _own.stages[-1])))).replace("[", r"\[")
        line.update(task, description=both)


_THRESHOLDS = 50_000, 50, 100
"""Thresholds for `gc.set_threshold`: the number of new objects, and those of collections of younger generations, after
which Python looks for reference cycles. Nearly all objects that planning makes live until it ends; with Python's
default thresholds, these searches take a seventh of its time."""

_collecting = threading.Lock()
_running: list[tuple[int, int, int]] = []
"""For each context that is active in any thread, the thresholds from before the first of them."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Context in which Python's garbage collector runs rarely, in all threads, or not at all if it is turned off. When
    the last active context ends, the old thresholds are set again."""
    with _collecting:
        _running.append(_running[0] if _running else gc.get_threshold())
        if _running[0][0]:
            gc.set_threshold(*map(max, _running[0], _THRESHOLDS))
    try:
        yield
    finally:
        with _collecting:
            before = _running.pop()
            if not _running:
                gc.set_threshold(*before)
