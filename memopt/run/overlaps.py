"""The forwards of several optimised models that wait for their backward at the same time, and what they hold."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from torch import nn

from memopt.planning.derived import StepBytes

_REMEMBERED = 16
"""The number of a model's latest backwards whose overlaps are remembered."""


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


class _WithStepBytes(Protocol):
    """An object with `step_bytes`, such as an `Entry`."""

    @property
    def step_bytes(self) -> StepBytes | None:
        """The bytes of its steps; None before the first."""


@dataclass(frozen=True)
class Overlap:
    """Which other models held memory at one moment while a forward waited for its backward, or in that backward. Each
    is given by its entry in the ledger: `waiting` has one for each forward that waited, in the order in which they
    began; `runs` is that of the model whose forward or backward was running."""

    waiting: tuple[weakref.ref[_WithStepBytes], ...]
    runs: weakref.ref[_WithStepBytes] | None = None
    """The entry whose forward or backward ran then; None for the backward of the one that waited."""
    begun_before: bool = False
    """Whether the forward of `runs` had begun before the one that waited: what it holds was there already."""

    def held_bytes(self, *, least: bool) -> int:
        """The bytes that the waiting forwards hold plus the peak of the running step: if `least`, with each model
        running by its plan that holds least, else with nothing recomputed."""
        held = sum(needs.least_held if least else needs.held for needs in _step_bytes_of(self.waiting))
        peaks = _step_bytes_of((self.runs,) if self.runs else ())
        return held + sum(needs.least_peak if least else needs.peak for needs in peaks)


def _step_bytes_of(entries: Iterable[weakref.ref[_WithStepBytes]]) -> Iterator[StepBytes]:
    for reference in entries:
        entry = reference()
        if entry is not None and (needs := entry.step_bytes) is not None:
            yield needs


@dataclass
class SeenOverlaps:
    """Which forwards of other models were seen to run or wait while those of one model waited."""

    meanwhile: deque[frozenset[Overlap]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """For each of its latest backwards, the overlaps since its forward."""
    backward: deque[Overlap] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """For each of its latest backwards, the forwards that waited then and had begun after its own."""
    known: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """The optimised models that trained on the device when one of its backwards began."""


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
