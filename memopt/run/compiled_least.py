"""The smallest budget of a step whose graphs are compiled: compiled code may need more than the plan that it is for, in
bytes of its own or in gaps that the order of its allocations leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memopt.account.account import Account
from memopt.capture.data_sizes import is_real
from memopt.capture.inputs import Call
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.emit.emitted import Emitted
from memopt.errors import BudgetError, CaptureError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.captured import Captured
from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.options import Effort
from memopt.planning.plan import Plan, PlanSource
from memopt.planning.refit import as_compiled
from memopt.planning.situation import Situation


def check_compiled_least(planner: CallPlanner, captured: CapturedCall, call: Call, situation: Situation) -> None:
    """Raise `BudgetError` where the budget is known to be smaller than what compiled code needs."""
    if not _compiles(planner, situation, whole=captured.whole):
        return
    known = planner.compiled_least.get(_key(planner, captured, call, situation))
    if known is None:
        return
    refusal, _ = known
    if planner.options.budget_bytes < refusal.smallest_bytes:
        raise BudgetError(planner.options.budget_bytes, refusal.smallest_bytes, refusal.dominated_by)


def as_compiled_least(
    refusal: BudgetError,
    planner: CallPlanner,
    captured: CapturedCall,
    call: Call,
    situation: Situation,
    emit: Callable[[Plan], Emitted],
) -> BudgetError:
    """The refusal of a call with the smallest budget in which the code that is compiled for its smallest plan runs; the
    same refusal where that is no larger, or where nothing can be compiled here."""
    if not refusal.least:
        return refusal
    try:
        plan = smallest_plan(refusal.smallest_bytes, planner, captured, call, situation)
        if plan is None:
            return refusal
        compiled = _compiled_bytes(plan, emit)
    except (BudgetError, CaptureError):
        return refusal
    named = refusal.adding(smallest_bytes=max(refusal.smallest_bytes, compiled))
    planner.compiled_least[_key(planner, captured, call, situation)] = named, plan
    return named


def smallest_plan(
    planned_bytes: int, planner: CallPlanner, captured: CapturedCall, call: Call, situation: Situation
) -> Plan | None:
    """The plan of a call for the smallest budget in which there is one, whose compiled code gives the figure of a
    refusal; None where nothing can be compiled here. Raises `BudgetError`, `CaptureError`."""
    if not _compiles(planner, situation, whole=captured.whole):
        return None
    if known := planner.compiled_least.get(_key(planner, captured, call, situation)):
        _, plan = known
        return plan  # later searches may find another plan for that budget, and its code hold more
    search = planner.search(situation, advise=False)
    search.budget_bytes = planned_bytes
    return search.fastest(planner.candidates(captured, call, situation, search))


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
    def captured(self) -> Captured:
        return self.own.captured

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
    alone = not (situation.to_come or situation.buckets or planner.proposing.allowed or planner.sharding)
    here = planner.options.hardware is None and all(map(is_real, planner.model.parameters()))
    return planner.fuses and whole and here and alone


def _key(
    planner: CallPlanner, captured: CapturedCall, call: Call, situation: Situation
) -> tuple[tuple[RecordedRegion, ...], Account, frozenset[int]]:
    """What the smallest budget of a call depends on: its regions, its account, and which parameters other calls reach,
    for which there is state of the optimiser."""
    own = {parameter for run in captured.runs for parameter in run.parameter_ids.values()}
    return captured.regions, planner.account(call, situation), planner.reached - own
