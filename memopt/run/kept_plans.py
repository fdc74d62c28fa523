"""Plans made earlier for the same step, and the smallest budget of a step whose graphs are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from memopt.account.account import Account
from memopt.capture.data_sizes import is_real
from memopt.capture.inputs import Call
from memopt.capture.operators import NothingToRewrite
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.emit.partition import Emitted
from memopt.errors import BudgetError, CaptureError
from memopt.planning import plan_cache
from memopt.planning.agreement import agreed
from memopt.planning.call_planner import CallPlanner
from memopt.planning.captured import Captured
from memopt.planning.footprint import Footprint
from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.kept_check import is_sound
from memopt.planning.options import Effort
from memopt.planning.plan import Plan, PlanSource
from memopt.planning.plan_cache import Kept
from memopt.planning.refit import as_compiled
from memopt.planning.situation import Situation


class KeptPlans:
    """Finds and keeps the plans of one model's calls. A plan from elsewhere is data: it is used where it was made for
    the same options and the same graphs, and where its schedule holds what it says (`is_sound`)."""

    def __init__(self, planner: CallPlanner) -> None:
        self.planner = planner

    def key(self, captured: CapturedCall, call: Call, situation: Situation) -> str | None:
        """The key that plans of a captured call are kept under; None where they are not kept."""
        if captured.graph is None or not self._keeps():
            return None
        return self.planner.job(call, situation).key(captured.graph)

    def note(self, key: str | None, call: Call, situation: Situation) -> None:
        """Keep the key of a call for `find_uncaptured`."""
        plan_cache.note(self._sketch(call, situation), key)

    def find_uncaptured(self, call: Call, situation: Situation) -> Kept | None:
        """The plan on disk for a call that is not captured yet, if it fits beside what lies on the device now; it is
        judged by the call's graphs before it runs."""
        key, kept = plan_cache.find_by(self._sketch(call, situation))
        if kept and not self._belongs(kept):
            plan_cache.drop(key)
            return None
        return kept if kept and self.planner.still_fits(kept.plan, call, situation) else None

    def find(self, key: str | None) -> Kept | None:
        """The plan on disk under a key; one that is not for these options is deleted."""
        kept = plan_cache.find(key)
        if kept and not self._belongs(kept):
            plan_cache.drop(key)
            return None
        return kept

    def plan(self, key: str | None, captured: CapturedCall, call: Call, situation: Situation) -> Plan | None:
        """The plan on disk under a key with the graphs of this captured call; None where there is none for these
        graphs, in which case what is there is deleted."""
        kept = self.find(key)
        plan = self.adopted(kept, captured, call, situation) if kept else None
        if plan is None:
            plan_cache.drop(key)
        return plan

    def keep(self, key: str | None, plan: Plan, footprint: Footprint | None = None) -> None:
        """Keep a plan on disk for the next start, with the bytes that its compiled code holds."""
        kept = self._data_of(plan, footprint)
        if kept is not None:
            plan_cache.keep(key, kept)

    def drop(self, key: str | None) -> None:
        """Delete the plan under a key, which turned out to belong to another step."""
        plan_cache.drop(key)

    def adopted(
        self, kept: Kept, captured: CapturedCall, call: Call, situation: Situation, *, lowering_bytes: int = 0
    ) -> Plan | None:
        """A plan from disk or of another rank with the graphs of this captured call; None where it was made for other
        graphs, or is not sound for these (`is_sound`)."""
        planner = self.planner
        if not self._belongs(kept) or not planner.still_fits(kept.plan, call, situation):
            return None
        try:
            step = planner.rewrite_and_price(captured, call, situation, planner.lever_sets[kept.lever_set])
        except NothingToRewrite:
            return None
        if [joint.fingerprint for joint in step.regions] != [region.fingerprint for region in kept.plan.regions]:
            return None
        step = planner.proposing.as_kept(step, kept.plan)
        plan = kept.live(lambda: step)
        account = planner.captured_account(captured, call, situation, step, lowering_bytes=lowering_bytes)
        account = planner.proposing.account_as_kept(account, kept.plan)
        return plan if is_sound(plan, kept.footprint, account, situation.to_come) else None

    def agreed(self, plan: Plan, captured: CapturedCall, call: Call, situation: Situation, lowering_bytes: int) -> Plan:
        """The plan that the first rank made for such a call, with this rank's graphs; on one rank `plan` itself."""
        kept = self._data_of(plan)
        first = self.of_ranks(kept, captured, call, situation, lowering_bytes) if kept else None
        if first is kept or first is None:
            return plan
        return self.adopted(first, captured, call, situation, lowering_bytes=lowering_bytes) or plan

    def of_ranks(
        self, kept: Kept, captured: CapturedCall, call: Call, situation: Situation, lowering_bytes: int = 0
    ) -> Kept:
        """The plan by which all ranks run such a call, which is `kept` unless another rank has planned it before."""
        if captured.graph is None or (situation.buckets is None and not captured.split):
            return kept
        key = self.planner.job(call, situation).key_of_ranks(captured.graph)
        return kept if key is None else agreed(f"{key}-{lowering_bytes}", kept)

    def _keeps(self) -> bool:
        return self.planner.options.kept and plan_cache.is_on()

    def _sketch(self, call: Call, situation: Situation) -> str | None:
        """The key on disk of a call that is not captured yet; None where plans are not kept."""
        return self.planner.job(call, situation).sketch() if self._keeps() else None

    def _data_of(self, plan: Plan, footprint: Footprint | None = None) -> Kept | None:
        """The part of a plan that other starts and ranks need; None where it depends on sizes that depend on data."""
        captured = plan.captured
        assert captured is not None
        rewritings = self.planner.lever_sets
        if captured.data_sizes.allowed or captured.rewriting not in rewritings:
            return None
        return Kept(plan, rewritings.index(captured.rewriting), footprint)

    def _belongs(self, kept: Kept) -> bool:
        """Whether a plan is for the budget and the levers of these options."""
        options, plan = self.planner.options, kept.plan
        known = 0 <= kept.lever_set < len(self.planner.lever_sets) and options.allow.issuperset(plan.proposals)
        return known and plan.budget_bytes == options.budget_bytes


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
