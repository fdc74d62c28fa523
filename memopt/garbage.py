"""How often Python looks for reference cycles while a step is captured and planned."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = 50_000, 50, 100
"""How many new objects, and collections of younger ones, Python waits for before it looks for reference cycles. Nearly
all that planning makes lives to its end: looking through it as often as by default takes a seventh of the time."""

_lock = threading.Lock()
_running: list[tuple[int, int, int]] = []
"""The thresholds from before, once for each context that is running in any thread."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Context in which Python looks for reference cycles rarely, in all threads; not more often than before it.

    Where collections are turned off, they stay off. The last context to end brings the thresholds back.
    """
    with _lock:
        _running.append(_running[0] if _running else gc.get_threshold())
        if _running[0][0]:
            gc.set_threshold(*map(max, _running[0], _THRESHOLDS))
    try:
        yield
    finally:
        with _lock:
            before = _running.pop()
            if not _running:
                gc.set_threshold(*before)
