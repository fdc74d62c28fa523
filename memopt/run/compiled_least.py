"""The smallest budget of a step whose graphs are compiled: compiled code may need more than the plan that it is for, in
bytes of its own or in gaps that the order of its allocations leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memopt.account.account import Account
from memopt.capture.data_sizes import is_real
from memopt.capture.region import RecordedRegion
from memopt.emit.emitted import Emitted
from memopt.errors import BudgetError, CaptureError
from memopt.planning.advice import search_for
from memopt.planning.call_planner import CallPlanner
from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.options import Effort
from memopt.planning.plan import Plan, PlanSource
from memopt.planning.priced_step import PricedStep
from memopt.planning.refit import as_compiled
from memopt.planning.stages import Recorded
from memopt.planning.terms import Situation


def check_compiled_least(recorded: Recorded) -> None:
    """Raise `BudgetError` where the budget is known to be smaller than what compiled code needs."""
    planner = recorded.planner
    if not _compiles(planner, recorded.situation, whole=recorded.captured.whole):
        return
    known = planner.compiled_least.get(_key(recorded))
    if known is None:
        return
    refusal, _ = known
    budget_bytes = planner.terms.options.budget_bytes
    if budget_bytes < refusal.smallest_bytes:
        raise BudgetError(budget_bytes, refusal.smallest_bytes, refusal.dominated_by)


def as_compiled_least(refusal: BudgetError, recorded: Recorded, emit: Callable[[Plan], Emitted]) -> BudgetError:
    """The refusal of a call with the smallest budget in which the code that is compiled for its smallest plan runs; the
    same refusal where that is no larger, or where nothing can be compiled here."""
    if not refusal.least:
        return refusal
    try:
        plan = smallest_plan(refusal.smallest_bytes, recorded)
        if plan is None:
            return refusal
        compiled = _compiled_bytes(plan, emit)
    except (BudgetError, CaptureError):
        return refusal
    named = refusal.adding(smallest_bytes=max(refusal.smallest_bytes, compiled))
    recorded.planner.compiled_least[_key(recorded)] = named, plan
    return named


def smallest_plan(planned_bytes: int, recorded: Recorded) -> Plan | None:
    """The plan of a call for the smallest budget in which there is one, whose compiled code gives the figure of a
    refusal; None where nothing can be compiled here. Raises `BudgetError`, `CaptureError`."""
    if not _compiles(recorded.planner, recorded.situation, whole=recorded.captured.whole):
        return None
    if known := recorded.planner.compiled_least.get(_key(recorded)):
        _, plan = known
        return plan  # later searches may find another plan for that budget, and its code hold more
    return search_for(recorded, advise=False, budget_bytes=planned_bytes).fastest(recorded)


def asked_as_compiled(
    plan: Plan, planner: CallPlanner, situation: Situation, emit: Callable[[Plan], Emitted], *, whole: bool
) -> Plan:
    """The plan of a call, in one region if `whole`; its `smallest_bytes` is what compiled code needs, where its graphs
    are compiled here."""
    known = plan.source is None or isinstance(plan.source, CompiledStep)
    if known or not _compiles(planner, situation, whole=whole):
        return plan
    assert plan.source is not None
    return replace(plan, source=CompiledStep(plan.source, emit))


@dataclass(eq=False)
class CompiledStep:
    """The `PlanSource` of a plan whose graphs are compiled. The smallest plan is compiled when its budget is first
    asked for."""

    own: PlanSource
    emit: Callable[[Plan], Emitted]
    _least: int | None = field(default=None, init=False)

    @property
    def priced(self) -> PricedStep:
        return self.own.priced

    def at(self, plan: Plan, budget_bytes: int, effort: Effort) -> Plan:
        found = self.own.at(plan, budget_bytes, effort)
        return found if found.source is None else replace(found, source=CompiledStep(found.source, self.emit))

    def frontier(self, plan: Plan, points: int, effort: Effort) -> Frontier[Plan]:
        return self.own.frontier(plan, points, effort)

    def recipes(self, plan: Plan) -> tuple[Recipe, ...]:
        return self.own.recipes(plan)

    def smallest_bytes(self, plan: Plan) -> int:
        if self._least is None:
            bare = replace(plan, account=replace(plan.account, lowering=0))
            planned = self.own.smallest_bytes(bare)
            self._least = max(planned, _compiled_bytes(self.own.at(bare, planned, plan.effort), self.emit))
        return self._least


def _compiled_bytes(plan: Plan, emit: Callable[[Plan], Emitted]) -> int:
    """The peak of a plan's compiled code, which is compiled now; 0 where the backend does not say what it holds."""
    footprint = emit(plan).footprint
    return 0 if footprint is None else as_compiled(plan, footprint).ceiling_bytes


def _compiles(planner: CallPlanner, situation: Situation, *, whole: bool) -> bool:
    """Whether the graphs of a call, in one region if `whole`, are compiled here, and planned alone: for this device, on
    values, without levers that change the optimiser, and not together with other forwards or other ranks."""
    alone = not (situation.to_come or situation.buckets or planner.proposing.allowed or planner.terms.sharding)
    here = planner.terms.options.hardware is None and all(map(is_real, planner.terms.model.parameters()))
    return planner.terms.fuses and whole and here and alone


def _key(recorded: Recorded) -> tuple[tuple[RecordedRegion, ...], Account, frozenset[int]]:
    """What the smallest budget of a call depends on: its regions, its account, and which parameters other calls reach,
    for which there is state of the optimiser."""
    accounts, captured = recorded.planner.accounts, recorded.captured
    own = {parameter for run in captured.runs for parameter in run.parameter_ids.values()}
    return captured.regions, accounts.account(recorded.call, recorded.situation), accounts.reached - own
