"""Progress messages on the terminal and in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

_console = Console(stderr=True)
_log = logging.getLogger("memopt")
_shown: list[Status | None] = []
"""The stages that are running, innermost last: the spinner of the outermost one, None for the others."""
_LOG_SECONDS = 10.0
"""The least time between two lines in the log about the progress of one stage."""


@contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Context that shows a spinner with `name` on a terminal, and afterwards the time if it was over a second.

    The time is also logged, at level DEBUG of the logger "memopt". The context's value is a function that reports
    progress: its text appears beside the spinner, and in the log (INFO) at most every ten seconds.
    """
    started = logged = time.perf_counter()
    spinner = _console.status(f"memopt: {name} …") if not _shown and _console.is_terminal else None

    def tell(detail: str) -> None:
        nonlocal logged
        if _shown[0] is not None:
            _shown[0].update(f"memopt: {name} … {detail}")
        if time.perf_counter() - logged >= _LOG_SECONDS:
            logged = time.perf_counter()
            _log.info("%s: %s", name, detail)

    _shown.append(spinner)
    try:
        if spinner is not None:
            with spinner:
                yield tell
        else:
            yield tell
    finally:
        _shown.pop()
        seconds = time.perf_counter() - started
        _log.debug("%s took %.1f s", name, seconds)
        if seconds > 1 and _console.is_terminal:
            _console.print(f"memopt: {name} [dim]{seconds:.1f} s[/dim]", highlight=False)
