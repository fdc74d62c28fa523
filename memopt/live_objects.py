"""The tensors and optimizers that are alive in this process, found without a walk through all objects each time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch


class _Mark:
    """Made at the end of each search. If the next search does not find it, objects have reached the oldest generation
    unnoticed, and all objects are searched."""


_KINDS: tuple[type, ...] = torch.Tensor, torch.optim.Optimizer, _Mark


def live_objects(*kinds: type) -> list[Any]:
    """The living tensors or optimizers, of these classes or of classes derived from them."""
    return _of(kinds, _old.with_young())


def _of(kinds: tuple[type, ...], candidates: list[Any]) -> list[Any]:
    # type(), not isinstance: the latter runs `__class__` properties of lazy modules and proxies.
    wanted = {kind for kind in set(map(type, candidates)) if issubclass(kind, kinds)}
    return [one for one in candidates if type(one) in wanted]


def _young() -> list[Any]:
    """The tensors, optimizers and marks in the younger two generations."""
    # An object that moves between these two calls is found twice.
    return _of(_KINDS, gc.get_objects(0)) + _of(_KINDS, gc.get_objects(1))


class _OldObjects:
    """The tensors and optimizers in the garbage collector's oldest generation, without keeping them alive.

    Objects come there only by a collection, before which the younger generations are searched: they have thousands of
    objects where a process that compiles has half a million, through which a walk takes tenths of a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[weakref.ref[Any]] = []
        self._promoted: list[weakref.ref[Any]] = []
        """Those that have come to the oldest generation since the latest search."""
        self._mark: _Mark | None = None
        """None before the first search: what is older than this module may be in any generation."""
        self._frozen = 0

    def with_young(self) -> list[Any]:
        """All living tensors, optimizers and marks, of any generation."""
        with self._lock:
            if self._before_collection not in gc.callbacks:
                gc.callbacks.append(self._before_collection)
            young, frozen = _young(), gc.get_freeze_count()
            promoted, self._promoted = self._promoted, []
            alive = [one for reference in (*self._known, *promoted) if (one := reference()) is not None]
            found = {id(one): one for one in (*alive, *young)}
            # gc.freeze() and gc.unfreeze() move objects, too
            if self._mark is None or id(self._mark) not in found or frozen != self._frozen:
                found = {id(one): one for one in _of(_KINDS, gc.get_objects())}
            self._known, self._mark, self._frozen = list(map(weakref.ref, found.values())), _Mark(), frozen
            return list(found.values())

    def _before_collection(self, phase: str, details: Mapping[str, int]) -> None:
        if phase == "start" and details["generation"]:
            self._promoted.extend(map(weakref.ref, _young()))


_old = _OldObjects()
