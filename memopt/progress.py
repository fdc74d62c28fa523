"""How far long work has come: one line that is kept up to date on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from memopt.terminal import Column, Console, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_console = Console(stderr=True)
_log = logging.getLogger("memopt")
_LOG_SECONDS = 10.0
"""The least time between two lines about the progress of one stage."""
_LONG_SECONDS = 1.0
"""A stage that takes less leaves no line."""


@dataclass(eq=False)
class _Stage:
    name: str
    started: float
    said: float
    """When the latest line about its progress was written."""
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the stages within it, by name."""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" if self.detail else self.name


_stages: list[_Stage] = []
"""The stages that are running, innermost last."""
_shown: list[tuple[Progress, TaskID]] = []
"""The line on the terminal, while there is one."""
_line_of: list[Callable[[str], None]] = []
"""Where lines about stages go beside the log, innermost last."""


@contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Context of a stage of long work; its value is a function that reports how far the stage has come.

    On a terminal the outermost running stage and the innermost one share a line with the seconds so far. A stage that
    ends after a second or more leaves a line with its seconds: on a terminal the outermost one only, with the seconds
    of its parts; in the log "memopt" each one, at level INFO (shorter ones at DEBUG). What a stage reports is in the
    log at most every ten seconds.
    """
    now = time.perf_counter()
    running = _Stage(name, now, now)
    _stages.append(running)
    try:
        with _line():
            yield lambda detail: _say(running, detail)
        _leave_line(running)
    finally:
        _stages.remove(running)
        _show()


def say(detail: str) -> None:
    """Report how far the innermost running stage has come; nothing without one."""
    if _stages:
        _say(_stages[-1], detail)


def tell(text: str, level: int = logging.INFO) -> None:
    """Write a line into the log "memopt". Outside of stages, and where stderr is no terminal, a line at level INFO also
    goes to stderr, unless the program has set up logging or given that logger a higher level."""
    _log.log(level, "%s", text)
    heard = _log.hasHandlers() or _log.level > level or level < logging.INFO
    if not (heard or _stages or _line_of or _console.is_terminal):
        _print(text)


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Context in which lines that the log gets at level INFO are also written to stderr, unless it is a terminal."""
    _line_of.append(lambda text: None if _console.is_terminal else _print(text))
    try:
        yield
    finally:
        _line_of.pop()


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
    """Write the line of a stage that has ended."""
    seconds = time.perf_counter() - running.started
    outer = _stages[0]
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
    for write in _line_of[-1:]:
        write(text)


@contextmanager
def _line() -> Iterator[None]:
    """Context with the line on the terminal, for the outermost stage; nothing for others, and elsewhere."""
    if len(_stages) > 1 or not _console.is_terminal:
        _show()
        yield
        return
    text = TextColumn("memopt: {task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = SpinnerColumn(), TimeElapsedColumn(), text
    # What the model prints meanwhile stays in the file that standard output is redirected to.
    apart = sys.stdout is not None and sys.stdout.isatty()
    with Progress(*columns, console=_console, transient=True, redirect_stdout=apart) as line:
        _shown.append((line, line.add_task("", total=None)))
        _show()
        try:
            yield
        finally:
            _shown.clear()


def _show() -> None:
    """Bring the line on the terminal up to date."""
    if _shown and _stages:
        line, task = _shown[0]
        # The description is markup to rich, in which a bracket would begin a tag.
        both = " · ".join(map(str, dict.fromkeys((_stages[0], _stages[-1])))).replace("[", r"\[")
        line.update(task, description=both)
