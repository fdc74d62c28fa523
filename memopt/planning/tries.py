"""The limit on the work that goes into finding changes with which a refused step would fit its budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from memopt.planning.options import Effort
from memopt.planning.stages import Priced

# The search for suggestions in a refusal may take one part in `_SHARE` of the work of planning, at least `_AT_LEAST`
# graph nodes.
_SHARE, _AT_LEAST = 5, 1000
# The work of one try, in traces of the step: a search for the smallest schedule alone; a capture with its trace and
# search; and the same with adapters at each linear layer, whose graph is larger.
SEARCH, CAPTURE, ADAPTERS = 0.4, 2.0, 4.0


@dataclass
class Tries:
    """How much work may still go into trying changes with which a step that no plan fits would fit: its `BudgetError`
    names those that help. Work is counted in graph nodes to trace, so that the error says the same on every machine.
    `untried` lists the changes that would take more."""

    left: float
    untried: list[str] = field(default_factory=list)

    @classmethod
    def beside(cls, steps: Sequence[Priced], effort: Effort) -> Tries:
        """The work, in graph nodes to trace, that may go into trying changes after the search for a plan, which traced
        `steps`, has found none: a fifth of the nodes of `steps`, at least 1000, with effort "default", any number with
        "best", and 0 with "fast", so that only changes are tried that need no trace of the step."""
        if effort.name == "default":
            return cls(max(_AT_LEAST, sum(map(nodes_of, steps)) / _SHARE))
        return cls(math.inf if effort.name == "best" else 0.0)

    def allow(self, way: str, traces: float, step: Priced) -> bool:
        """Whether the change `way` may be tried, which takes as long as `traces` traces of `step`. If so, that work is
        subtracted from what is left; if not, the change is added to `untried`."""
        if not self.can(way, traces, step):
            return False
        self.left -= traces * nodes_of(step)
        return True

    def can(self, way: str, traces: float, step: Priced) -> bool:
        """Whether enough work is left to try `way`, which takes as much as `traces` tracings of the step; unlike
        `allow`, it takes none of that work. If not, the change is added to `untried`."""
        possible = traces * nodes_of(step) <= self.left
        self.untried += [] if possible else [way]
        return possible

    @property
    def notes(self) -> list[str]:
        """A sentence on what was not tried; none where all was tried."""
        if not self.untried:
            return []
        ways = "; ".join(self.untried)
        return [f"what may help too, but was not tried as that takes long (effort='best' tries all of it): {ways}"]


def nodes_of(step: Priced) -> int:
    """The number of nodes in all joint graphs of a step."""
    return sum(len(region.module.graph.nodes) for region in step.step.traced.regions)
