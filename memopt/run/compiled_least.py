"""The smallest budget of a step whose graphs are compiled: compiled code may need more than the plan that it is for, in
bytes of its own or in gaps that the order of its allocations leaves."""

from __future__ import annotations

from collections.abc import Callable

from memopt.account.account import Account
from memopt.capture.data_sizes import is_real
from memopt.capture.inputs import Call
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.emit.emitted import Emitted
from memopt.errors import BudgetError, CaptureError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan import Plan
from memopt.planning.refit import as_compiled
from memopt.planning.situation import Situation


def check_compiled_least(planner: CallPlanner, captured: CapturedCall, call: Call, situation: Situation) -> None:
    """Raise `BudgetError` where the budget is known to be smaller than what compiled code needs."""
    if not _compiles(planner, captured, situation):
        return
    known = planner.compiled_least.get(_key(planner, captured, call, situation))
    if known is not None and planner.options.budget_bytes < known.smallest_bytes:
        raise BudgetError(planner.options.budget_bytes, known.smallest_bytes, known.dominated_by)


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
    if not refusal.least or not _compiles(planner, captured, situation):
        return refusal
    search = planner.search(situation, advise=False)
    search.budget_bytes = refusal.smallest_bytes
    try:
        plan = search.fastest(planner.candidates(captured, call, situation, search))
        footprint = emit(plan).footprint
    except (BudgetError, CaptureError):
        return refusal
    if footprint is None:
        return refusal
    named = refusal.with_smallest(max(refusal.smallest_bytes, as_compiled(plan, footprint).ceiling_bytes))
    planner.compiled_least[_key(planner, captured, call, situation)] = named
    return named


def _compiles(planner: CallPlanner, captured: CapturedCall, situation: Situation) -> bool:
    """Whether the graphs of a call are compiled here, and planned alone: for this device, on values, without levers
    that change the optimiser, and not together with other forwards or other ranks."""
    alone = not (situation.to_come or situation.buckets or planner.proposing.allowed or planner.sharding)
    here = planner.options.hardware is None and all(map(is_real, planner.model.parameters()))
    return planner.fuses and captured.whole and here and alone


def _key(
    planner: CallPlanner, captured: CapturedCall, call: Call, situation: Situation
) -> tuple[tuple[RecordedRegion, ...], Account]:
    return captured.regions, planner.account(call, situation)
