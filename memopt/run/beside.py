"""The forwards of several optimised models that wait for their backward at the same time, and what they hold."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from torch import nn

from memopt.planning.derived import Needs

_REMEMBERED = 16
"""The number of backwards of a model of which is remembered what came before them."""


class Alone(NamedTuple):
    """A call that runs as the plain model does with no other forward beside it."""

    budget_bytes: int
    """The smallest budget with which it does, with all that lies elsewhere."""
    held_bytes: int
    """Held between its forward and its backward."""
    peak_bytes: int
    """The most that its forward and backward hold beside what lasts."""


AsPlain: TypeAlias = Callable[[int], Alone | None]
"""Returns for a budget in bytes how a call would run plain; None where it would not, within that budget."""


class _Needing(Protocol):
    """A model of which it is known what its steps need."""

    @property
    def needs(self) -> Needs | None:
        """What they need; None before the first."""


@dataclass(frozen=True)
class Beside:
    """Forwards of other models that were there while a forward waited, or ran through its backward: of these entries,
    in the order in which they began."""

    waiting: tuple[weakref.ref[_Needing], ...]
    runs: weakref.ref[_Needing] | None = None
    """The entry whose forward or backward ran then; None for the backward of the one that waited."""
    begun_before: bool = False
    """Whether that one had begun before: what it holds was there already."""

    def needs(self, *, least: bool) -> int:
        """The bytes that they hold together: by the plans that hold least, or with nothing recomputed."""
        held = sum(needs.least_held if least else needs.held for needs in _needs(self.waiting))
        peaks = _needs((self.runs,) if self.runs else ())
        return held + sum(needs.least_peak if least else needs.peak for needs in peaks)


def _needs(entries: Iterable[weakref.ref[_Needing]]) -> Iterator[Needs]:
    for reference in entries:
        entry = reference()
        if entry is not None and (needs := entry.needs) is not None:
            yield needs


@dataclass
class Seen:
    """What was seen of other models' forwards beside those of one model."""

    meanwhile: deque[frozenset[Beside]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """For each of its backwards what had run since its forward."""
    backward: deque[Beside] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """What was there in the backward and had not been in the forward."""
    known: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """The models that were there in the latest one."""


def shared(seen: Iterable[Beside], own_least: int, own_most: int, room_bytes: int) -> int:
    """The bytes of `room_bytes` that are left to what was seen: its least, and of the rest a part in the proportion of
    what each would hold with nothing recomputed. `own_least` and `own_most` are those that the model itself holds."""
    found = list(seen)
    least = max((one.needs(least=True) for one in found), default=0)
    most = max((one.needs(least=False) for one in found), default=0)
    wanted = most - least + own_most - own_least
    spare = max(0, room_bytes - least - own_least)
    return least + (most - least if spare >= wanted else spare * (most - least) // wanted)


def breadth(model: nn.Module) -> float:
    """A number to which the activations of a model are about proportional, for a guess before its first forward: the
    widths of its layers, where one without parameters is as wide as the one before."""
    widths, width = 0.0, 1.0
    for module in model.modules():
        if next(module.children(), None) is None:
            shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
            found = [shape[:2].numel() ** (0.5 if len(shape) > 1 else 1.0) for shape in shapes]
            width = max(found, default=width)
            widths += width
    return max(1.0, widths)
