"""Says what memopt is doing while it takes longer than a moment."""

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
"""The stages under way, the outermost with its spinner, if it has one."""
# Between two lines in a log on how far a stage has come.
_LOG_SECONDS = 10.0


@contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Shows a spinner with `name` on a terminal, and the time it took once it took over a second.

    Elsewhere (a log file, a notebook server) the time goes to the logger "memopt" at level INFO. Gives a function that
    shows how far the stage has come: beside the spinner at once, in the log every ten seconds.
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
        _log.info("%s took %.1f s", name, seconds)
        if seconds > 1 and _console.is_terminal:
            _console.print(f"memopt: {name} [dim]{seconds:.1f} s[/dim]", highlight=False)
