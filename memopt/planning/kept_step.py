"""The step of a plan that keeps blocks gathered under FSDP2: about other budgets it is asked with all blocks freed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.options import Effort
from memopt.planning.plan import Plan, PlanSource
from memopt.planning.priced_step import PricedStep


def beside_freed(plan: Plan, freed: Plan) -> Plan:
    """A plan that keeps blocks, whose smallest budget and curve are those of the plan that frees all of them."""
    return plan if plan.source is None else replace(plan, source=KeptStep(plan.source, freed))


@dataclass(frozen=True)
class KeptStep:
    """The `PlanSource` of a plan that keeps blocks."""

    own: PlanSource
    freed: Plan
    """The plan of the same call that frees all blocks after their forward."""

    @property
    def priced(self) -> PricedStep:
        return self.own.priced

    def at(self, plan: Plan, budget_bytes: int, effort: Effort) -> Plan:
        return self._step.at(self.freed, budget_bytes, effort)

    def frontier(self, plan: Plan, points: int, effort: Effort) -> Frontier[Plan]:
        return self._step.frontier(self.freed, points, effort)

    def recipes(self, plan: Plan) -> tuple[Recipe, ...]:
        return self.own.recipes(plan)

    def smallest_bytes(self, plan: Plan) -> int:
        return self._step.smallest_bytes(self.freed)

    @property
    def _step(self) -> PlanSource:
        assert self.freed.source is not None, "a plan that runs has its graphs"
        return self.freed.source
