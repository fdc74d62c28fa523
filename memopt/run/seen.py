"""What was seen in the steps of a model, by which later ones are planned: what searches of the device found, how many
forwards run before each backward, and which forwards of other optimised models run meanwhile."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from memopt.account.elsewhere import Elsewhere
from memopt.planning.derived import StepBytes
from memopt.planning.plan import Plan

REMEMBERED = 16
"""The number of a model's latest backwards whose overlaps are remembered, and of groups of forwards whose sizes are."""


@dataclass
class LatestLooks:
    """The results of the latest searches of the device for tensors outside of the step, at moments of one
    `Moment.kind`: all before a forward or all before a backward, with equally many forwards waiting."""

    found: Elsewhere
    """The latest search's result."""
    levels: deque[tuple[int, int]]
    """For each search: the bytes allocated less those that memopt accounts for (`Moment.known_bytes`), and how many of
    these the search did not find elsewhere."""

    highest: int
    """The most bytes allocated, less those that memopt accounts for, at any search of this kind since a plan was
    made."""

    @property
    def level(self) -> int:
        """The bytes that were allocated when the device was last searched for tensors outside of the step, less those
        that memopt accounts for (`Moment.known_bytes`)."""
        return self.levels[-1][0]

    @property
    def lowest(self) -> int:
        """The smallest number of bytes allocated at any of the latest searches, less those that memopt accounts for."""
        return min([level for level, _ in self.levels])

    @property
    def most(self) -> int:
        """The most bytes that any of the latest searches found elsewhere."""
        return max([level - rest for level, rest in self.levels])

    def limit(self, level: int) -> int:
        """An upper bound on what a search would find outside of the step now, when `level` bytes are allocated besides
        those that memopt accounts for. Some of these belong to the step: the fewest that did at any of the latest
        searches are subtracted."""
        return max(0, level - min([rest for _, rest in self.levels]))


@dataclass
class ForwardGroups:
    """The latest groups of forwards of one model; a group is the forwards that wait together for their backward."""

    at_least: int = 1
    """The least number of forwards that are expected in a group, as the user gave it as `forwards`."""
    beside_waiting: tuple[int, int] | None = None
    """The bytes held by the latest forward that was not the first of its group, and the most that any forward waiting
    then held; None before one."""
    _present: int = 0
    """The number of forwards of the present group so far."""
    _earlier: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The sizes of earlier groups."""

    def begin(self, waiting: int) -> None:
        """Count a forward that begins while `waiting` others wait for their backward; with `waiting` 0 a new group
        begins."""
        if waiting:
            self._present = max(self._present, waiting + 1)
            return
        if self._present:
            self._earlier.append(self._present)
        self._present = 1

    @property
    def done(self) -> int:
        """The number of earlier groups, as far as they are remembered."""
        return len(self._earlier)

    @property
    def others_expected(self) -> int:
        """The number of forwards that the present group is expected to have after its first."""
        return max([self.at_least, *self._earlier]) - 1

    def held_after(self, plan: Plan) -> int:
        """The bytes that each forward of a group but the first is expected to hold if the first runs by `plan`: as many
        as the latest forward held that was not the first of its group. If the forwards that waited then all held less
        than `plan` does, at least as many as `plan` holds."""
        after, before = self.beside_waiting or (plan.held_bytes, 0)
        return after if plan.held_bytes <= before else max(after, plan.held_bytes)


class Alone(NamedTuple):
    """The bytes of a call that runs without a plan while no other forward waits: see the fields."""

    budget_bytes: int
    """The smallest budget with which it fits, including the bytes elsewhere."""
    held_bytes: int
    """The bytes that it holds between its forward and its backward."""
    peak_bytes: int
    """The most bytes that its forward and backward hold, without those that stay from step to step."""


AsPlain: TypeAlias = Callable[[int], Alone | None]
"""Takes a budget in bytes; returns the bytes of a call that runs plain within it, or None where it does not fit."""


@dataclass(frozen=True)
class Overlap:
    """Other models that held memory at one moment while a forward waited for its backward, or in that backward. Each
    is given by its `Entry` in the ledger: `waiting` has one for each forward that waited, in the order in which they
    began; `runs` is that of the model whose forward or backward was running."""

    waiting: tuple[weakref.ref[Any], ...]
    runs: weakref.ref[Any] | None = None
    """The entry whose forward or backward ran then; None for the backward of the one that waited."""
    begun_before: bool = False
    """Whether the forward of `runs` had begun before the one that waited: what it holds was there already."""

    def held_bytes(self, *, least: bool) -> int:
        """The bytes that the waiting forwards hold plus the peak of the running step: if `least`, with each model
        running by its plan that holds least, else with nothing recomputed."""
        held = sum(needs.least_held if least else needs.held for needs in _step_bytes_of(self.waiting))
        peaks = _step_bytes_of((self.runs,) if self.runs else ())
        return held + sum(needs.least_peak if least else needs.peak for needs in peaks)


def _step_bytes_of(entries: Iterable[weakref.ref[Any]]) -> Iterator[StepBytes]:
    for reference in entries:
        entry = reference()
        if entry is not None and (needs := entry.step_bytes) is not None:
            yield needs


def room_for_others(seen: Iterable[Overlap], own_least: int, own_most: int, room_bytes: int) -> int:
    """How many of `room_bytes` a model leaves for forwards of other models that were seen to overlap with its own.

    First, each model gets what it holds by its plan that holds least: the other models what `seen` says, the model
    itself `own_least`. The rest of the room is divided in proportion to how much more each would hold with nothing
    recomputed, which is `own_most` in all for the model itself.
    """
    found = list(seen)
    least = max((one.held_bytes(least=True) for one in found), default=0)
    most = max((one.held_bytes(least=False) for one in found), default=0)
    wanted = most - least + own_most - own_least
    spare = max(0, room_bytes - least - own_least)
    return least + (most - least if spare >= wanted else spare * (most - least) // wanted)


def breadth(model: nn.Module) -> float:
    """A number roughly proportional to the activations of a model, for guesses before its first forward: the sum of the
    widths of its layers; a layer without parameters counts as wide as the one before. Where there are convolutions, no
    layer counts as wider than the widest of them: a wider one, as in a classifier's head, runs at fewer positions."""
    widths, width, channels = [], 1.0, 0.0
    for module in model.modules():
        if next(module.children(), None) is None:
            shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
            found = [shape[:2].numel() ** (0.5 if len(shape) > 1 else 1.0) for shape in shapes]
            width = max(found, default=width)
            widths.append(width)
            channels = max(channels, width if any(len(shape) > 2 for shape in shapes) else 0.0)
    return max(1.0, sum(min(one, channels or one) for one in widths))
