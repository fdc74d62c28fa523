"""One optimised model in the ledger of its device: its forwards in flight, and what was found beside its steps."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from memopt.account.elsewhere import Found
from memopt.compat.tensors import WeakStorage
from memopt.planning.plan import Plan
from memopt.recent import Recent

_TOLERANCE = 64
"""What appears beside a step is tolerated up to this part of the parameters' bytes, a 256th of what a step with their
gradients and two states keeps,"""
_LEAST_TOLERANCE = 64 * 1024
"""and at least up to these bytes: Python and `malloc` need some of their own."""
_REMEMBERED = 16
"""The number of groups of forwards whose size is remembered."""
_MOST_KINDS = 64
"""The number of kinds of moments of a model for which the bytes allocated are remembered."""


class Forward(Protocol):
    """A forward by a plan, as the ledger knows it."""

    plan: Plan
    held_bytes: int
    outputs: list[WeakStorage]
    number: int
    done: bool

    def held(self) -> list[torch.Tensor]:
        """The tensors that it has saved and not freed yet."""

    def after_backward(self) -> None:
        """Mark it as done."""

    def undo(self) -> bool:
        """Undo it once its backward failed; returns whether all is as it was."""

    def is_in_backward(self) -> bool:
        """Whether it is its backward that runs."""

    def saved_bytes(self) -> int:
        """The bytes that it would hold until its backward with nothing recomputed."""

    def roomy_bytes(self, needed: int, *, retained: bool = False) -> int:
        """A budget of at least `needed` bytes with room for other forwards."""


class Plain(Protocol):
    """A forward that runs as the plain model does, as the ledger knows it."""

    held_bytes: int
    room_bytes: int
    optimizer_state: int
    outputs: tuple[WeakStorage, ...]


@dataclass
class Looked:
    """The latest looks at moments of one kind."""

    found: Found
    """What the latest one found."""
    levels: deque[tuple[int, int]]
    """For each of them the bytes that were allocated without those that are known, and how many of these were none of
    the bytes found."""

    highest: int
    """The most bytes that were allocated at one of all such moments that were looked at."""

    @property
    def level(self) -> int:
        """The bytes that were allocated at the latest one, without those that are known."""
        return self.levels[-1][0]

    @property
    def lowest(self) -> int:
        """The fewest bytes that were allocated at one of them, without those that are known."""
        return min(level for level, _ in self.levels)

    def limit(self, level: int) -> int:
        """No less than what is to be found where so many bytes are allocated without those that are known, if no fewer
        of them are something else than at the latest looks."""
        return max(0, level - min(rest for _, rest in self.levels))


@dataclass(eq=False)
class Entry:
    """An optimised model in the ledger of its device: its forwards that wait for their backward, which disappear by
    themselves once they are freed, and what was found beside its steps."""

    model: nn.Module
    budget_bytes: int
    fixed_bytes: int | None = None
    """The bytes to count elsewhere instead of those that are there; 0 for a plan for another device."""
    with_state: bool = True
    """Whether the account has the optimiser's state, so that more than it expects is counted elsewhere."""
    latest_outputs: Sequence[WeakStorage] = ()
    """The storages of what the latest forward returned; callers often hold them until the next one returns."""
    later_bytes: int = 0
    """The most bytes elsewhere that were found to appear between a forward and its backward."""
    begun: int = 0
    """The number of forwards that have begun."""
    latest: weakref.ref[Forward] | None = None
    """The forward that began last."""
    found: Found = field(default_factory=Found)
    """What the latest look at any moment found."""
    looks: Recent[object, Looked] = field(default_factory=lambda: Recent(_MOST_KINDS))
    """The latest looks by the kind of moment."""
    due: bool = False
    """Whether a plan was made since the latest look at a moment: planning leaves memory of its own behind."""
    at_least: int = 1
    """The number of forwards that are expected before a backward, at least: a group."""
    others_expected: int = 0
    """The number of further forwards that the present group is expected to have after its first."""
    held_after: int | None = None
    """The bytes that the latest forward held which was not the first of its group."""
    planned: weakref.WeakSet[Forward] = field(default_factory=weakref.WeakSet)
    plain: weakref.WeakSet[Plain] = field(default_factory=weakref.WeakSet)
    _group: int = 0
    _groups: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """The sizes of the groups before."""

    def __post_init__(self) -> None:
        self.others_expected = self.at_least - 1

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def tolerance_bytes(self) -> int:
        """The bytes that plans leave free for what appears unnoticed. Half of them may have appeared before a forward,
        the other half before its backward."""
        return max(_LEAST_TOLERANCE, sum(parameter.nbytes for parameter in self.model.parameters()) // _TOLERANCE)

    @property
    def notable_bytes(self) -> int:
        """The bytes of which a change is looked at."""
        return self.tolerance_bytes // 2

    @property
    def has_looked(self) -> bool:
        """Whether it is known which optimisers step the model, and what tensors lie beside it."""
        return self.fixed_bytes is not None or len(self.looks) > 0

    def begin(self, waiting: int) -> None:
        """Count a forward that begins while `waiting` others wait for their backward; the first of a group if none."""
        if waiting:
            self._group = max(self._group, waiting + 1)
        else:
            self._groups.append(self._group)
            self._group = 1
            self.others_expected = max(self.at_least, *self._groups) - 1

    def add(self, forward: Forward) -> None:
        """Add a planned forward that begins now."""
        self.begun += 1
        self.latest = weakref.ref(forward)
        forward.number = self.begun
        self.latest_outputs = forward.outputs
        self.planned.add(forward)

    def waiting(self) -> list[Forward]:
        """The planned forwards whose backward has not run yet, in their order."""
        if not self.planned:  # iterating takes longer than this
            return []
        return sorted((forward for forward in self.planned if not forward.done), key=lambda forward: forward.number)

    def plain_waiting(self) -> list[Plain]:
        """The forwards of calls that ran as the plain model whose backward has not begun yet."""
        return list(self.plain) if self.plain else []

    def in_backward(self) -> list[Forward]:
        """The forwards through which the backward that runs has come."""
        return [forward for forward in self.planned if forward.is_in_backward()]

    @property
    def held_bytes(self) -> int:
        """The bytes that forwards hold which wait for their backward, those of plain calls too."""
        return sum(forward.held_bytes for forward in self.waiting()) + self.plain_held_bytes

    @property
    def plain_held_bytes(self) -> int:
        """The bytes that forwards of plain calls hold which wait for their backward."""
        return sum(forward.held_bytes for forward in self.plain_waiting())
