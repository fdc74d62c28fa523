"""Plans made earlier for the same step, and the smallest budget of a step whose graphs are compiled.

A plan from disk or from another rank is used only if it was made for the same options and graphs, and if its schedule
is valid for these and has the peak that it states (`is_sound`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memopt.account.account import Account
from memopt.capture.data_sizes import is_real
from memopt.capture.inputs import Call
from memopt.capture.operators import NothingToRewrite
from memopt.emit.emit import Emitted
from memopt.errors import BudgetError, CaptureError
from memopt.planning import plan_cache
from memopt.planning.advice import search_for
from memopt.planning.call_planner import CallPlanner, CompiledKey
from memopt.planning.figures import recounted
from memopt.planning.plan import Plan
from memopt.planning.plan_cache import Kept, is_sound
from memopt.planning.refit import Footprint, as_compiled
from memopt.planning.stages import Recorded
from memopt.planning.terms import Situation


def key(recorded: Recorded) -> str | None:
    """The key that plans of a recorded call are stored under. None where they are not stored: for a call in several
    regions, one whose inputs the caller changes in place, and with `MEMOPT_CACHE=0`."""
    graph = recorded.captured.graph
    changed = any(region.changed for region in recorded.captured.regions)
    if graph is None or changed or not _keeps(recorded.planner):
        return None
    return recorded.planner.job(recorded.call, recorded.situation).key(graph)


def note(key: str | None, recorded: Recorded) -> None:
    """Store the key of a recorded call on disk, so that `find_uncaptured` finds the call's plan in a later process.
    Does nothing if `key` is None."""
    plan_cache.note(_sketch(recorded.planner, recorded.call, recorded.situation), key)


def find_uncaptured(planner: CallPlanner, call: Call, situation: Situation) -> Kept | None:
    """The plan on disk for a call that is not captured yet, if it fits together with the tensors that are elsewhere on
    the device now; None where there is none. It still has to be checked against the call's graphs before it runs."""
    kept = find(planner, plan_cache.noted_key(_sketch(planner, call, situation)))
    return kept if kept and planner.accounts.still_fits(kept.plan, call, situation) else None


def find(planner: CallPlanner, key: str | None) -> Kept | None:
    """The plan on disk under `key`; None where there is none, or one made for other options, which is deleted."""
    kept = plan_cache.find(key, Kept)
    if kept and not _belongs(planner, kept):
        plan_cache.drop(key)
        return None
    return kept


def plan(key: str | None, recorded: Recorded) -> Plan | None:
    """The plan on disk under `key`, with the graphs of this recorded call. None where there is none, or one that
    `adopted` does not take, which is deleted."""
    kept = find(recorded.planner, key)
    found = adopted(kept, recorded) if kept else None
    if found is None:
        plan_cache.drop(key)
    return found


def keep(planner: CallPlanner, key: str | None, plan: Plan, footprint: Footprint | None = None) -> None:
    """Store a plan on disk for later processes, with the bytes that its compiled code holds."""
    kept = _data_of(planner, plan, footprint)
    if kept is not None:
        plan_cache.keep(key, kept)


def adopted(kept: Kept, recorded: Recorded, *, lowering_bytes: int = 0) -> Plan | None:
    """The stored plan, from disk or another rank, with the graphs of this recorded call; None where it was made for
    other options or graphs, does not fit beside what is elsewhere on the device now, or is not sound (`is_sound`).
    `lowering_bytes`: what compiled code holds beyond the peak of its schedule."""
    planner = recorded.planner
    # No figure of a plan depends on the bytes that were left free for other models.
    recorded = replace(recorded, situation=replace(recorded.situation, for_other_models=0))
    if not _belongs(planner, kept) or not planner.accounts.still_fits(kept.plan, recorded.call, recorded.situation):
        return None
    try:
        traced = recorded.trace(planner.terms.lever_sets[kept.lever_set])
    except NothingToRewrite:
        return None
    if [joint.fingerprint for joint in traced.step.regions] != [one.fingerprint for one in kept.plan.regions]:
        return None
    account = planner.optimizer_choice.account_of(traced.account(lowering_bytes), kept.plan)
    priced = traced.price_for(kept.plan, account)
    plan = kept.live(lambda: priced.step)
    return plan if is_sound(plan, kept.footprint, account, recorded.situation.to_come) else None


def agreed(plan: Plan, recorded: Recorded, lowering_bytes: int = 0) -> Plan:
    """The plan by which all ranks run this recorded call, with this rank's graphs: that of the rank that planned it
    first. `plan`, this rank's own, where the ranks run no collectives together in the call, where plans like it are not
    shared, or where the other rank's is not valid here. `lowering_bytes`: what compiled code holds beyond its plan."""
    kept = _data_of(recorded.planner, plan)
    first = of_ranks(kept, recorded, lowering_bytes) if kept else None
    if first is kept or first is None:
        return plan
    return adopted(first, recorded, lowering_bytes=lowering_bytes) or plan


def of_ranks(kept: Kept, recorded: Recorded, lowering_bytes: int = 0) -> Kept:
    """The plan by which all ranks run this recorded call: that of the rank that planned it first. `kept`, this
    rank's own plan, where the ranks run no collectives together in the call."""
    captured, situation = recorded.captured, recorded.situation
    if captured.graph is None or (situation.buckets is None and not captured.split):
        return kept
    key = recorded.planner.job(recorded.call, situation).key_of_ranks(captured.graph)
    return kept if key is None else plan_cache.agreed(f"{key}-{lowering_bytes}", kept)


def _keeps(planner: CallPlanner) -> bool:
    return planner.terms.options.to_train and plan_cache.is_on()


def _sketch(planner: CallPlanner, call: Call, situation: Situation) -> str | None:
    """The key on disk of a call that is not captured yet; None where plans are not kept."""
    return planner.job(call, situation).sketch() if _keeps(planner) else None


def _data_of(planner: CallPlanner, plan: Plan, footprint: Footprint | None = None) -> Kept | None:
    """The part of a plan that later processes and other ranks need; None where the plan has data-dependent sizes or
    parameters on the host, or other levers than a new search would try."""
    (step, schedule), rewritings = plan.solved, planner.terms.lever_sets
    captured = step.traced
    if captured.data_sizes.allowed or captured.rewriting not in rewritings or plan.hosted_bytes:
        return None
    return Kept(plan, schedule, rewritings.index(captured.rewriting), footprint)


def _belongs(planner: CallPlanner, kept: Kept) -> bool:
    """Whether a plan is for the budget and the levers of this planner's options."""
    options, plan = planner.terms.options, kept.plan
    known = 0 <= kept.lever_set < len(planner.terms.lever_sets) and options.allow.issuperset(plan.proposals)
    return known and plan.budget_bytes == options.budget_bytes


def check_compiled_least(recorded: Recorded) -> None:
    """Raise `BudgetError` where an earlier compilation has shown that the budget is too small for this call's compiled
    code."""
    planner = recorded.planner
    if not compiles(planner, recorded.situation):
        return
    key, account = _key(recorded)
    known = planner.compiled_least.get(key)
    if known is None or known[0] != account:
        return
    _, refusal, _ = known
    budget_bytes = planner.terms.options.budget_bytes
    if budget_bytes < refusal.smallest_bytes:
        raise BudgetError(budget_bytes, refusal.smallest_bytes, refusal.dominated_by)


def as_compiled_least(
    refusal: BudgetError, recorded: Recorded, emit: Callable[[Plan], Sequence[Emitted]]
) -> BudgetError:
    """`refusal` with the smallest budget in which the call's smallest plan runs as compiled by `emit`; unchanged where
    that budget is no larger, or where nothing can be compiled here."""
    if not refusal.least:
        return refusal
    try:
        plan = smallest_plan(refusal.smallest_bytes, recorded)
        if plan is None:
            return refusal
        compiled = compiled_bytes(plan, emit)
    except (BudgetError, CaptureError):
        return refusal
    named = refusal.adding(smallest_bytes=max(refusal.smallest_bytes, compiled))
    key, account = _key(recorded)
    recorded.planner.compiled_least[key] = account, named, plan
    return named


def smallest_plan(planned_bytes: int, recorded: Recorded) -> Plan | None:
    """The plan of a call with the smallest peak, to be compiled: the peak of its code is the smallest budget that a
    `BudgetError` names. None where nothing can be compiled here (`compiles`).

    If `as_compiled_least` has stored a plan, that one is returned, with the bytes that are outside of the step now in
    its account. Else it is the fastest plan within `planned_bytes`, the smallest budget that a plan fits before it is
    compiled. Raises `BudgetError` where no plan fits in `planned_bytes`, and `CaptureError` where the call cannot be
    traced."""
    if not compiles(recorded.planner, recorded.situation):
        return None
    key, account = _key(recorded)
    if known := recorded.planner.compiled_least.get(key):
        # Another search might find another plan for that budget, whose code holds more.
        _, _, plan = known
        return recounted(plan, replace(plan.account, **{name: getattr(account, name) for name in _BESIDE}))
    return search_for(recorded, advise=False, budget_bytes=planned_bytes).fastest(recorded)


def compiled_bytes(plan: Plan, emit: Callable[[Plan], Sequence[Emitted]]) -> int:
    """The peak of a plan's code, which is compiled now; 0 where the backend does not report what the code holds."""
    footprints = [region.footprint for region in emit(plan)]
    return as_compiled(plan, footprints).ceiling_bytes if any(footprints) else 0


def compiles(planner: CallPlanner, situation: Situation) -> bool:
    """Whether a call's plan is compiled in this process and concerns that call alone: the plan is for this device,
    parameters have values, no lever on the optimizer may still be chosen, and no other forwards or ranks are planned
    with it."""
    if not planner.terms.fuses:
        return False
    alone = not (situation.to_come or situation.buckets or planner.optimizer_choice.allowed or planner.terms.sharding)
    return alone and planner.terms.options.hardware is None and all(map(is_real, planner.terms.model.parameters()))


_BESIDE: dict[str, Any] = {"elsewhere": 0, "unforeseen": 0, "tolerance": 0, "card_state": None}
"""The fields of an account for tensors outside of the step, with their values if there are none. They change the
smallest budget, not the schedule with the smallest peak."""


def _key(recorded: Recorded) -> tuple[CompiledKey, Account]:
    """A key of all that the smallest schedule of a call depends on, and the account that its smallest budget also
    depends on. The key has the regions, the bytes that the step holds beside activations, and the `id`s of the
    parameters that only other calls train, as the optimizer has state for these too."""
    accounts, captured = recorded.planner.accounts, recorded.captured
    own = {parameter for run in captured.runs for parameter in run.parameter_ids.values()}
    account = accounts.account(recorded.call, recorded.situation)
    return (captured.regions, replace(account, **_BESIDE), accounts.reached - own), account
