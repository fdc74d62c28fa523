"""The stages of a training call, in order: capture, rewrite, price, solve, emit, install.

    capture ─▶ Recorded ─trace─▶ Traced ─price─▶ Priced ─solve─▶ Plan ─emit─▶ Emitted, one for each run
    ─install─▶ Executable, which the stubs of regions run

Everything here happens outside of Dynamo's and AOTAutograd's callbacks, for all regions of a call together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch

from memopt.capture.captured_call import CapturedCall, RegionRun
from memopt.capture.dry_run import cannot_capture
from memopt.capture.dynamo import in_brief_with_line
from memopt.capture.inputs import Call, tensors_in
from memopt.capture.operators import NothingToRewrite
from memopt.capture.region import RecordedRegion
from memopt.device.devices import device_of
from memopt.emit.emit import Emitted, emit_plan
from memopt.emit.gradients import Accumulation
from memopt.errors import BudgetError, CaptureError
from memopt.planning import plan_cache
from memopt.planning.advice import search_for
from memopt.planning.call_planner import CallPlanner
from memopt.planning.derived import (
    among_equals,
    extended,
    least_plan,
    leaving_free,
    leaving_room,
    nothing_recomputed,
    retained_peak,
    with_kept_outputs,
)
from memopt.planning.figures import beside_plain
from memopt.planning.plan import Plan, ReceiptRow
from memopt.planning.plan_search import Decided, PlanSearch
from memopt.planning.refit import FURTHER_ROUNDS, ROUNDS, Refit, as_compiled
from memopt.planning.stages import Recorded, StepOfPlan
from memopt.planning.terms import Situation
from memopt.progress import rare_collections
from memopt.run import kept_plans
from memopt.run.executable import Executable
from memopt.run.kept_plans import as_compiled_least, check_compiled_least, smallest_plan
from memopt.run.until_backward import LARGE_LOSS_OUTSIDE, staying
from memopt.solver import SolverError
from memopt.units import size
from passes import PassError


class Road:
    """Takes the captured calls of one model through all later stages, from rewriting to emitted code. A plan from disk
    replaces rewriting, pricing and solving. `planning` is called with a call whenever its planning begins."""

    def __init__(self, planner: CallPlanner, accumulation: Accumulation, planning: Callable[[Call], None]) -> None:
        self.planner, self.accumulation, self._begins = planner, accumulation, planning
        self._emit = partial(emit_plan, accumulation=accumulation)
        self.plans = 0
        """The number of plans that were made or read from disk."""
        self.planning_seconds = 0.0
        """The longest time in seconds that a call took from its recording to its plan or refusal."""
        self._decided: tuple[RecordedRegion, Decided | None] | None = None
        """The region of the latest planned call in one region, and the levers on which its plan decided."""
        self._lowering: WeakKeyDictionary[RecordedRegion, int] = WeakKeyDictionary()
        """The bytes that compiled code was found to hold beyond its plan, by the first region of the call."""

    def plan(
        self,
        captured: CapturedCall,
        call: Call,
        situation: Situation,
        plain: Callable[[], ReceiptRow | None] = lambda: None,
        *,
        advise: bool,
    ) -> Plan:
        """The plan of a captured call, made before its first run or read from disk.

        `plain` returns the row of the plain step for the beginning of the receipt, or None. `advise`: a `BudgetError`
        names changes that would help. Raises `BudgetError` where no plan fits, `CaptureError` where the graphs of the
        call cannot be rewritten or priced."""
        recorded = Recorded(self.planner, captured, call, situation)
        with self._planning(call), self.planner.accounts.one_look(call, situation):
            self.plans += 1
            key = kept_plans.key(recorded)
            kept_plans.note(key, recorded)
            if found := kept_plans.plan(key, recorded):
                return self.finished(self.beside_plain(found, plain), situation)
            check_compiled_least(recorded)
            try:
                plan = self._searched(recorded, search_for(recorded, ahead=True, advise=advise))
            except BudgetError as refusal:
                raise self._named(
                    as_compiled_least(refusal, recorded, self._emit) if advise else refusal, recorded
                ) from None
            plan = self.beside_plain(plan, plain)
            if not self.planner.terms.options.to_train and isinstance(plan.source, StepOfPlan):
                plan = replace(plan, source=replace(plan.source, tightest=recorded.tightest))
            kept_plans.keep(self.planner, key, plan)
            return self.finished(plan, situation)

    def plan_regions(self, captured: CapturedCall, call: Call, situation: Situation) -> Plan:
        """The plan by which a call in several regions runs; where regions are compiled, one whose compiled code fits
        the budget. Raises the errors of `plan`."""
        if not self.planner.terms.fuses:
            return self.plan(captured, call, situation, advise=False)
        recorded = Recorded(self.planner, captured, call, situation)
        with self._planning(call), self.planner.accounts.one_look(call, situation):
            self.plans += 1
            return self.finished(self._planned_and_emitted(recorded, None).plan, situation)

    def beside_plain(self, plan: Plan, count: Callable[[], ReceiptRow | None]) -> Plan:
        """The plan with the row of the plain step, which `count` returns, at the beginning of its receipt; unchanged
        where `count` returns None."""
        return beside_plain(plan, count, low=self.planner.terms.rewriting.autocast is not None)

    def finished(self, plan: Plan, situation: Situation) -> Plan:
        """The plan of a call in the form in which the caller gets it: as it is, unless the backend compiles code here.
        Compiled code may hold other bytes than planned; so reading `smallest_gb` of the returned plan compiles the plan
        with the smallest peak."""
        if not (isinstance(plan.source, StepOfPlan) and kept_plans.compiles(self.planner, situation)):
            return plan
        compiled = plan.source.compiled_bytes or partial(kept_plans.compiled_bytes, emit=self._emit)
        return replace(plan, source=replace(plan.source, compiled_bytes=compiled))

    def emit_call(
        self,
        captured: CapturedCall,
        call: Call,
        situation: Situation,
        planned: Plan | None = None,
        *,
        advise: bool = True,
    ) -> Executable:
        """Plan a captured call so that it fits the budget, and emit its code; `planned` is its plan if there is one
        already; `advise`: a `BudgetError` names levers on the optimizer that would help. Raises the errors of `plan`.

        Objects that only planning needs are freed, as they would stay for the whole training."""
        recorded = Recorded(self.planner, captured, call, situation)
        gc.collect(1)  # a capture leaves cycles, which would fragment the memory of the plan's own objects
        try:
            with self._planning(call):
                self.plans += 1
                with self.planner.accounts.one_look(call, situation):
                    device = self.planner.terms.device()
                    device_of(device).start_libraries(device)
                    # A plan made in advance is on disk already, except one with proposals: they are part of the key in
                    # use.
                    on_disk = planned is not None and not planned.proposals and not self.planner.terms.fuses
                    key = None if on_disk else kept_plans.key(recorded)
                    emitted = self._emitted_as_kept(key, recorded)
                    if emitted is None:
                        emitted = self._planned_and_emitted(recorded, planned, advise=advise)
                        footprint = emitted.region.footprint if emitted.region else None
                        kept_plans.keep(self.planner, key, emitted.plan, footprint)
                if captured.whole:
                    self._decided = captured.regions[0], Decided.by(emitted.plan)
                return replace(emitted, plan=self.finished(emitted.plan, situation))
        finally:
            self.planner.forget_solvers()
            for region in captured.regions:
                region.forget_dispatches()
            gc.collect(1)  # frees the young graphs left by the compilation; older ones belong to the plan

    def extend(
        self, plan: Plan, captured: CapturedCall, call: Call, situation: Situation, known: Sequence[int | None]
    ) -> Plan | None:
        """The plan of a call in several regions, made from the earlier `plan` without a search. `known` has for each
        run of the call the index of the same run in `plan`, whose schedule it keeps, or None for a new run, which
        recomputes nothing. Returns None where a search is needed, for instance because such a plan exceeds the
        budget. Raises `CaptureError` where the graphs cannot be rewritten or priced."""
        planner, of_plan = self.planner, plan.captured
        assert of_plan is not None
        recorded = Recorded(planner, captured, call, situation)
        if of_plan.rewriting not in planner.terms.lever_sets or plan.proposals or situation.to_come:
            return None
        with self._planning(call), planner.accounts.one_look(call, situation):
            try:
                traced = recorded.trace(of_plan.rewriting)
            except NothingToRewrite:
                return None
            found = extended(plan, traced.price(traced.account()), known)
        self.plans += found is not None
        return found

    @contextmanager
    def _planning(self, call: Call) -> Iterator[None]:
        """A context in which garbage is collected rarely. Its errors are raised as a `CaptureError`, except refusals
        and errors in the user's input."""
        self._begins(call)
        started = time.perf_counter()
        try:
            with rare_collections():
                yield
        except (BudgetError, CaptureError, PassError, SolverError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            raise CaptureError(cannot_capture(self.planner.terms.model, in_brief_with_line(failure))) from failure
        finally:
            self.planning_seconds = max(self.planning_seconds, time.perf_counter() - started)

    def _planned_and_emitted(self, recorded: Recorded, planned: Plan | None, *, advise: bool = True) -> Executable:
        """The call with its plan and code. Where compiled code holds other bytes than planned, the call is planned and
        compiled again, at most `ROUNDS` times; then by its smallest plan, and from there at most `FURTHER_ROUNDS` times
        by larger ones. Raises `BudgetError` and `CaptureError`."""
        check_compiled_least(recorded)
        captured = recorded.captured
        first = captured.regions[0]
        refit: Refit[tuple[Emitted, ...]] = Refit(self.planner.terms.options.budget_bytes, self._lowering.get(first, 0))
        for plan in self._rounds(refit, recorded, planned, advise=advise):
            regions = self._emit(plan)
            footprints = [region.footprint for region in regions]
            if not any(footprints):
                return self.ready(captured, plan, captured.runs, regions[0])
            refit.judge(plan, as_compiled(plan, footprints), regions)
        plan, regions = refit.best()
        self._lowering[first] = plan.account.lowering
        return self.ready(captured, plan, captured.runs, regions[0])

    def ready(
        self, captured: CapturedCall, plan: Plan, runs: tuple[RegionRun, ...], region: Emitted | None = None
    ) -> Executable:
        """The `Executable` with these fields. Where its plan needs expandable segments, they are switched on in the
        torch allocator of this process."""
        if plan.account.expandable:
            device_of(self.planner.terms.device()).expand_segments()
        return Executable(captured, plan, runs, region)

    def _rounds(
        self, refit: Refit[tuple[Emitted, ...]], recorded: Recorded, planned: Plan | None, *, advise: bool
    ) -> Iterator[Plan]:
        """Yields plans to compile, one after the other, until `refit` has a good one: the smallest if none of the first
        ones fits, and then larger ones again.

        Raises `BudgetError` and `CaptureError`.
        """

        def solved(lowering_bytes: int) -> Plan:
            return self._searched(recorded, search_for(recorded, advise=advise), lowering_bytes=lowering_bytes)

        refusal = None
        for _ in range(ROUNDS):
            try:
                plan = planned or solved(refit.lowering_bytes)
            except BudgetError as error:
                refusal = error
                break
            if not refit.is_new(plan):
                break
            yield plan
            planned = None
            if not refit.again:
                break
        if refit.fits:
            return
        least = refusal.smallest_bytes - refit.lowering_bytes if refusal else self._planned_least(recorded)
        if refit.take_smallest(least):
            smallest = smallest_plan(least, recorded)
            budget_bytes = self.planner.terms.options.budget_bytes
            yield replace(smallest, budget_bytes=budget_bytes) if smallest else solved(refit.lowering_bytes)
            with suppress(BudgetError):
                for _ in range(FURTHER_ROUNDS if refit.fits else 0):
                    if refit.again and refit.is_new(plan := solved(refit.lowering_bytes)):
                        yield plan
        elif refusal is not None:
            raise self._named(as_compiled_least(refusal, recorded, self._emit), recorded)

    def _planned_least(self, recorded: Recorded) -> int:
        """The bytes that the smallest plan of a call needs, before that is compiled."""
        none_left = self.planner.terms.options.budget_bytes
        try:
            self._searched(recorded, search_for(recorded, advise=False), lowering_bytes=none_left)
        except BudgetError as refusal:
            return refusal.smallest_bytes - none_left
        raise AssertionError("a plan was found although no bytes of the budget were left for it")

    def _named(self, refusal: BudgetError, recorded: Recorded) -> BudgetError:
        """The refusal of a call, naming a budget that also suffices for later steps of a training loop. Beyond the
        first step it has room for: gradients that exist when a forward begins, as in a loop that sets them to None
        after it; gradients of inputs, which stay where a loop reads them; a loss outside of the model that needs more
        than the least guess; and half of the tolerance.

        The parts for gradients of parameters and for the loss do not raise the budget above what the step holds with
        nothing recomputed. Nothing is added on a GPU, with levers on the optimizer, where parameters are sharded, for
        one of a group of forwards, and where the device is not searched for tensors elsewhere.
        """
        planner, situation = self.planner, recorded.situation
        if any(region.takes_derivatives for region in recorded.captured.regions):
            refusal = refusal.adding(
                "the forward takes derivatives itself, so that the step has second derivatives in it"
            )
        own_terms = planner.optimizer_choice.allowed or planner.optimizer_choice.chosen or planner.terms.sharding
        if not planner.accounts.beside.tolerance_bytes or own_terms or situation.to_come:
            return refusal
        first = next(recorded.candidates())
        if first.account.caching:  # on a card, the named budget itself was replayed
            return refusal
        traced = recorded.trace(first.levers)
        seen, guessed = traced.callers_code
        returned = recorded.captured.returned_bytes
        held = situation.gradients_held or planner.accounts.beside.gradients_may_stay
        appear = [
            one for one in tensors_in(recorded.call) if one.requires_grad and not (one.is_leaf and one.grad is not None)
        ]
        of_inputs = sum(one.nbytes for one in appear) if situation.for_other_models == 0 else 0

        def least(spared: int) -> int:
            others = (situation.for_other_models or 0) + spared - staying(spared)
            later = replace(situation, gradients_held=held, for_other_models=others)
            later = replace(later, other_forwards=situation.other_forwards + staying(spared))
            candidates = replace(recorded, situation=later).candidates()
            return min(with_kept_outputs(priced, returned) for priced in candidates)

        roomy = nothing_recomputed(first, returned)
        unseen = planner.accounts.beside.tolerance_bytes // 2
        if seen <= LARGE_LOSS_OUTSIDE * traced.step.tangent_bytes + unseen:  # else the first step has no room for it
            # More bytes left free need not raise the smallest peak found.
            roomy = min(max(map(least, {0, guessed})), roomy)
        spare = max(0, roomy - refusal.smallest_bytes) + unseen + of_inputs
        words = (
            "of the budget that works are for gradients held when a forward begins, a loss outside of the model, and "
            "tensors that may appear meanwhile"
        )
        return refusal.adding(f"{size(spare)} {words}", smallest_bytes=refusal.smallest_bytes + spare)

    def _searched(self, recorded: Recorded, search: PlanSearch, *, lowering_bytes: int = 0) -> Plan:
        """The plan with the shortest step that fits, agreed with other ranks; `lowering_bytes` are the bytes that
        compiled code holds beyond its plan. Raises `BudgetError` and `CaptureError`."""
        situation, decided = recorded.situation, self._decided_for(recorded)

        def spare(nbytes: int, staying: int = 0) -> Plan:
            others = situation.other_forwards + staying
            sparing = replace(situation, for_other_models=nbytes - staying, other_forwards=others)
            sparing_it = replace(recorded, situation=sparing)
            fresh = search_for(sparing_it, advise=False) if nbytes else search
            found = fresh.fastest(sparing_it, lowering_bytes=lowering_bytes, decided=decided)
            return kept_plans.agreed(found, sparing_it, lowering_bytes)

        def beside(others_bytes: int) -> Plan:
            others = replace(situation, to_come=0, other_forwards=situation.other_forwards + others_bytes)
            alone = replace(recorded, situation=others)
            return self._searched(alone, search_for(alone, advise=False), lowering_bytes=lowering_bytes)

        if situation.to_come:
            return among_equals(beside, situation.to_come, self.planner.terms.options.budget_bytes, least_plan)
        if situation.for_other_models is None:
            return leaving_room(spare(0))
        first = self.planner.terms.lever_sets[0] if decided is None else decided.rewriting
        _, guessed = recorded.trace(first).callers_code
        free, stays = situation.for_other_models + guessed, staying(guessed)
        if free:
            plan = leaving_free(spare, free, stays)
        else:
            found = search.fastest(recorded, lowering_bytes=lowering_bytes, decided=decided)
            plan = kept_plans.agreed(found, recorded, lowering_bytes)
        for _ in range(ROUNDS if self.planner.accounts.beside.keeps_graph else 0):
            if plan.schedule is None or (lacking := retained_peak(plan, plan.schedule) - plan.budget_bytes) <= 0:
                break
            free, stays = free + lacking, stays + lacking
            plan = leaving_free(spare, free, stays)
        return plan

    def _decided_for(self, recorded: Recorded) -> Decided | None:
        """The levers of the plan for other sizes of this call in one region; None where there is none, or its levers
        find nothing to rewrite here. Raises `CaptureError`."""
        if not recorded.captured.whole or self._decided is None or self._decided[0] is recorded.captured.regions[0]:
            return None
        decided = self._decided[1]
        if decided is not None and decided.rewriting in self.planner.terms.lever_sets:
            with suppress(NothingToRewrite):
                recorded.trace(decided.rewriting)
                return decided
        return None

    def _emitted_as_kept(self, key: str | None, recorded: Recorded) -> Executable | None:
        """The call, emitted by its plan from disk; None where there is none, or its graphs or compiled bytes differ."""
        kept = kept_plans.find(self.planner, key)
        if kept is None or (self.planner.terms.fuses and kept.footprint is None):  # not compiled yet
            return None
        if not self.planner.terms.fuses:
            kept = kept_plans.of_ranks(kept, recorded)
        plan = kept_plans.adopted(kept, recorded)
        region = self._emit(plan)[0] if plan else None
        if plan is None or region is None or region.footprint != kept.footprint:
            plan_cache.drop(key)
            return None
        return self.ready(recorded.captured, plan, recorded.captured.runs, region)
