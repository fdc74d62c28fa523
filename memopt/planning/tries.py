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
    """The work that may still go into trying changes with which a refused step might fit. Its `BudgetError` names the
    changes that help. Work is counted in graph nodes to trace, so that the error says the same on every machine.
    `untried` lists the changes that would take more work than is left."""

    left: float
    untried: list[str] = field(default_factory=list)

    @classmethod
    def beside(cls, steps: Sequence[Priced], effort: Effort) -> Tries:
        """The work, in graph nodes to trace, that may go into trying changes when a search that traced `steps` found no
        plan. With effort "default" it is a fifth of the nodes of `steps`, but at least 1000; with "best" there is no
        limit; with "fast" it is 0: only changes that need no trace of the step are tried."""
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
        """A list of one sentence, on the changes that were not tried; empty where all were tried."""
        if not self.untried:
            return []
        ways = "; ".join(self.untried)
        return [f"what may help too, but was not tried as that takes long (effort='best' tries all of it): {ways}"]


def nodes_of(step: Priced) -> int:
    """The number of nodes in all joint graphs of a step."""
    return sum(len(region.module.graph.nodes) for region in step.step.traced.regions)
