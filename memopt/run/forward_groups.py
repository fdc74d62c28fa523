"""How many forwards of a model run before each backward, and how many are to come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from memopt.planning.plan import Plan

_REMEMBERED = 16
"""The number of groups whose sizes are remembered."""


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
    _earlier: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
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
