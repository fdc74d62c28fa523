"""How often Python looks for reference cycles while a step is captured and planned."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = 50_000, 50, 100
"""Thresholds for `gc.set_threshold`: the number of new objects, and those of collections of younger generations, after
which Python looks for reference cycles. Nearly all objects that planning makes live until it ends; with Python's
default thresholds, these searches take a seventh of its time."""

_lock = threading.Lock()
_running: list[tuple[int, int, int]] = []
"""For each context that is active in any thread, the thresholds from before the first of them."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Context in which Python's garbage collector runs rarely, in all threads, or not at all if it is turned off. When
    the last active context ends, the old thresholds are set again."""
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
