"""Which blocks under FSDP2 stay gathered from their forward to their backward: as many as the budget has room for."""

from __future__ import annotations

from collections.abc import Callable

from memopt.capture.region import CapturedCall
from memopt.compat.exchanges import Resharding
from memopt.errors import BudgetError
from memopt.planning.plan import Plan
from memopt.recent import Recent
from memopt.run.planned_runs import PlannedRuns
from memopt.run.sharding import Sharded

Planned = Callable[[Plan | None], PlannedRuns]
"""Plans a forward as the model is set at the call, given the plan that frees all blocks if there is one."""

_MOST_PLANS = 64
_TRIES = 3
"""How many numbers of blocks are planned for, beside none: each takes a capture and a plan."""


class Keeping:
    """Decides for each planned forward how many of the last blocks it keeps, which saves a gather for each of them.

    Every rank plans with all blocks freed, then with as many kept as the room that its plan leaves has bytes for, if
    that adds no recomputation. The smallest of these numbers holds on all ranks, since their gathers must match.
    """

    def __init__(self, resharding: Resharding, sharded: Sharded) -> None:
        self.resharding, self.sharded = resharding, sharded
        self._found: Recent[tuple[PlannedRuns, int], int] = Recent(_MOST_PLANS)
        """The numbers of blocks by the plan that frees all of them, and by the largest number that is possible."""

        self.freed: CapturedCall | None = None
        """The latest call as it was captured with all blocks freed."""

    @property
    def kept(self) -> tuple[tuple[str, int], ...]:
        """The path and the bytes of each block that is kept as the model is set now."""
        return self.resharding.in_use

    def decide(self, planned: Planned) -> None:
        """Set the blocks that the forward which begins now keeps, the same on all ranks.

        Raises the `BudgetError` of a rank whose forward does not fit with all blocks freed, on all ranks.
        """
        if self.sharded.there:
            self.sharded.agree(lambda most: self._choose(planned, most))

    def _choose(self, planned: Planned, most: int) -> int:
        """Set, and return, the number of blocks that this rank keeps: at most `most`."""
        self.resharding.keep(0)
        freed = planned(None)
        self.freed = freed.captured
        most = min(most, len(self.resharding.blocks))
        if (freed, most) not in self._found:
            self._found[freed, most] = self._search(planned, freed.plan, most)
        self.resharding.keep(self._found[freed, most])
        return self.resharding.count

    def _search(self, planned: Planned, freed: Plan, most: int) -> int:
        """The largest number of blocks found with which the forward fits and recomputes no longer than `freed`."""
        # One more than there is room for: it is not gathered beside the block that comes before it in the backward.
        first = min(most, self._fitting(freed.budget_bytes - freed.ceiling_bytes) + 1)
        for count in range(first, max(0, first - _TRIES), -1):
            self.resharding.keep(count)
            try:
                plan = planned(freed).plan
            except BudgetError:
                continue
            if plan.added_seconds <= freed.added_seconds:
                return count
        return 0

    def _fitting(self, room_bytes: int) -> int:
        """The number of last blocks whose gathered parameters fit into so many bytes."""
        count = 0
        for block in reversed(self.resharding.blocks):
            room_bytes -= block.gathered_bytes
            if room_bytes < 0:
                break
            count += 1
        return count
