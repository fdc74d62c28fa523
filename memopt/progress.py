"""Says what memopt is doing while it takes longer than a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_console = Console(stderr=True)
_log = logging.getLogger("memopt")
_depth = 0


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Shows a spinner with `name` on a terminal, and the time it took once it took over a second.

    Elsewhere (a log file, a notebook server) the time goes to the logger "memopt" at level INFO.
    """
    global _depth
    started = time.perf_counter()
    outermost = _depth == 0 and _console.is_terminal
    _depth += 1
    try:
        if outermost:
            with _console.status(f"memopt: {name} …"):
                yield
        else:
            yield
    finally:
        _depth -= 1
        seconds = time.perf_counter() - started
        _log.info("%s took %.1f s", name, seconds)
        if seconds > 1 and _console.is_terminal:
            _console.print(f"memopt: {name} [dim]{seconds:.1f} s[/dim]", highlight=False)
