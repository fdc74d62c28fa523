"""The stages of a training call, in order: capture, rewrite, price, solve, emit, install.

    capture ─▶ CapturedCall ─rewrite─▶ JointGraph, one for each run ─price─▶ Captured (Joined) ─solve─▶ Plan
    ─emit─▶ Emitted, one for each run ─install─▶ EmittedCall, which the stubs of regions run

Everything here happens outside of Dynamo's and AOTAutograd's callbacks, for all regions of a call together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from memopt.capture.dynamo import in_brief_with_line
from memopt.capture.inputs import Call
from memopt.capture.operators import NothingToRewrite
from memopt.capture.region import CapturedCall
from memopt.capture.rehearsal import cannot_capture
from memopt.device.libraries import start_libraries
from memopt.emit.emit import emit_plan
from memopt.emit.emitted import Emitted
from memopt.emit.gradients import Accumulation
from memopt.errors import BudgetError, CaptureError
from memopt.planning import plan_cache
from memopt.planning.advice import Advice
from memopt.planning.agreement import agreed
from memopt.planning.among_equals import among_equals
from memopt.planning.call_planner import CallPlanner
from memopt.planning.extended import extended
from memopt.planning.footprint import Footprint
from memopt.planning.kept_check import is_sound
from memopt.planning.plan import Plan
from memopt.planning.plan_cache import Kept
from memopt.planning.plan_search import PlanSearch
from memopt.planning.refit import ROUNDS, Refit, as_compiled
from memopt.planning.situation import Situation
from memopt.solver import SolverError
from passes import PassError


@dataclass(frozen=True, eq=False)
class EmittedCall:
    """A planned call that can be run: its plan, and the function that the stub of its one region calls."""

    plan: Plan
    region: Emitted
    """Runs the one region of the call."""


class Road:
    """Takes the captured calls of one model through all later stages, and keeps their plans on disk."""

    def __init__(self, planner: CallPlanner, accumulation: Accumulation) -> None:
        self.planner, self.accumulation = planner, accumulation
        self.plans = 0
        """The number of plans that were made, or read from disk."""

    def plan(self, captured: CapturedCall, call: Call, situation: Situation, *, advise: bool) -> Plan:
        """The plan of a captured call, made ahead of its first run or read from disk.

        `advise`: a refusal names changes that would help.

        Raises `BudgetError`, `CaptureError`.
        """
        with self._planning():
            return self._plan(captured, call, situation, advise=advise)

    def _plan(self, captured: CapturedCall, call: Call, situation: Situation, *, advise: bool) -> Plan:
        self.plans += 1
        key = self._key(captured, call, situation)
        plan_cache.note(self.sketch(call, situation), key)
        kept = self._find(key)
        if kept and (found := self._by_kept(kept, captured, call, situation)):
            return found
        plan_cache.drop(key)
        search = self.planner.search(situation, advise=advise)
        search.narrowed = self.planner.on_narrow_parameters(call, situation)
        if advise:
            search.advice = Advice(self.planner, call, situation)
        plan = self._rewrite_price_solve(captured, call, situation, search)
        self.keep(key, plan)
        return plan

    def extend(
        self, plan: Plan, captured: CapturedCall, call: Call, situation: Situation, known: Sequence[int | None]
    ) -> Plan | None:
        """The plan of a call in several regions by the schedules of one that has most of them, as `extended`; None
        where a search has to be made. Raises `CaptureError`."""
        of_plan = plan.captured
        assert of_plan is not None
        planner = self.planner
        sets = [levers for levers in planner.lever_sets if levers.rewriting == of_plan.rewriting]
        if not sets or plan.proposals or situation.to_come:
            return None
        with self._planning():
            try:
                step = planner.rewrite_and_price(captured, call, situation, sets[0])
            except NothingToRewrite:
                return None
            found = extended(plan, step, planner.captured_account(captured, call, situation, step), known)
        self.plans += found is not None
        return found

    def travel(
        self, captured: CapturedCall, call: Call, situation: Situation, planned: Plan | None = None
    ) -> EmittedCall:
        """Plan and emit a captured call so that it runs within the budget; `planned` is its plan if there is one.

        Where compiled code holds other bytes than planned, the call is planned and compiled again, `ROUNDS` times at
        most. Raises `BudgetError`, `CaptureError`.
        """
        with self._planning():
            return self._travel(captured, call, situation, planned)

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """A block whose errors, but for refusals and errors of the user's input, are raised as a `CaptureError`."""
        try:
            yield
        except (BudgetError, CaptureError, PassError, SolverError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as failure:
            raise CaptureError(cannot_capture(self.planner.model, in_brief_with_line(failure))) from failure

    def _travel(self, captured: CapturedCall, call: Call, situation: Situation, planned: Plan | None) -> EmittedCall:
        self.plans += 1
        start_libraries(self.planner.device())
        # A plan made ahead is kept already, but for one with proposals: those are part of the key once they are used.
        settled = planned is not None and not planned.proposals and not self.planner.fuses
        key = None if settled else self._key(captured, call, situation)
        if kept := self._emitted_by_kept(key, captured, call, situation):
            return kept
        refit: Refit[EmittedCall] = Refit(self.planner.options.budget_bytes)
        for _ in range(ROUNDS):
            try:
                plan = planned or self._rewrite_price_solve(
                    captured, call, situation, self.planner.search(situation), lowering_bytes=refit.lowering_bytes
                )
            except BudgetError:
                if not refit.fits:
                    raise
                break
            planned = None
            emitted = EmittedCall(plan, emit_plan(plan, self.accumulation))
            footprint = emitted.region.footprint
            if footprint is None:
                self.keep(key, plan)
                return emitted
            if not refit.judge(as_compiled(plan, footprint), emitted):
                break
        plan, emitted = refit.best()
        self.keep(key, plan, emitted)
        return EmittedCall(plan, emitted.region)

    def _rewrite_price_solve(
        self,
        captured: CapturedCall,
        call: Call,
        situation: Situation,
        search: PlanSearch,
        *,
        lowering_bytes: int = 0,
    ) -> Plan:
        """The plan with the shortest step that fits; a lever set is rewritten and priced when the search asks for it.

        Raises `BudgetError`, `CaptureError`.
        """

        def plan(situation: Situation, search: PlanSearch) -> Plan:
            candidates = self.planner.candidates(captured, call, situation, search, lowering_bytes=lowering_bytes)
            return self._agreed(search.fastest(candidates), captured, call, situation, lowering_bytes)

        if not situation.to_come:
            return plan(situation, search)

        def beside(others_bytes: int) -> Plan:
            others = replace(situation, to_come=0, other_forwards=situation.other_forwards + others_bytes)
            return plan(others, self.planner.search(others, advise=False))

        return among_equals(beside, situation.to_come, self.planner.options.budget_bytes)

    def _agreed(
        self, plan: Plan, captured: CapturedCall, call: Call, situation: Situation, lowering_bytes: int
    ) -> Plan:
        """The plan that the first rank made for such a call, with this rank's graphs."""
        kept = self._kept(plan)
        first = self._of_ranks(kept, captured, call, situation, lowering_bytes)
        if first is kept or first is None:
            return plan
        return self._by_kept(first, captured, call, situation, lowering_bytes=lowering_bytes) or plan

    def _of_ranks(
        self, kept: Kept | None, captured: CapturedCall, call: Call, situation: Situation, lowering_bytes: int = 0
    ) -> Kept | None:
        """The plan by which all ranks run such a call, which is `kept` unless another rank has planned it before."""
        if kept is None or captured.graph is None or situation.buckets is None:
            return kept
        key = self.planner.job(call, situation).key_of_ranks(captured.graph)
        return kept if key is None else agreed(f"{key}-{lowering_bytes}", kept)

    def sketch(self, call: Call, situation: Situation) -> str | None:
        """The key on disk of a call that is not captured yet; None where plans are not kept."""
        return self.planner.job(call, situation).sketch() if self._keeps() else None

    def _key(self, captured: CapturedCall, call: Call, situation: Situation) -> str | None:
        """The key that plans of a captured call are kept under; None where they are not kept."""
        if captured.graph is None or not self._keeps():
            return None
        return self.planner.job(call, situation).key(captured.graph)

    def _keeps(self) -> bool:
        return self.planner.options.kept and plan_cache.is_on()

    def keep(self, key: str | None, plan: Plan, emitted: EmittedCall | None = None) -> None:
        """Keep a plan on disk for the next start."""
        kept = self._kept(plan, emitted.region.footprint if emitted else None)
        if kept is not None:
            plan_cache.keep(key, kept)

    def _kept(self, plan: Plan, footprint: Footprint | None = None) -> Kept | None:
        """The part of a plan that other starts and ranks need; None where it depends on sizes that depend on data."""
        captured = plan.captured
        assert captured is not None
        rewritings = [levers.rewriting for levers in self.planner.lever_sets]
        if captured.data_sizes.allowed or captured.rewriting not in rewritings:
            return None
        return Kept(plan, rewritings.index(captured.rewriting), footprint)

    def find_sketched(self, call: Call, situation: Situation) -> Kept | None:
        """The plan on disk for a call that is not captured yet, if it fits beside what lies on the device now; it is
        judged by the call's graphs before it runs."""
        key, kept = plan_cache.find_by(self.sketch(call, situation))
        if kept and not self._belongs(kept):
            plan_cache.drop(key)
            return None
        return kept if kept and self.planner.still_fits(kept.plan, call, situation) else None

    def _find(self, key: str | None) -> Kept | None:
        """The plan on disk under a key; one that is not for these options is deleted."""
        kept = plan_cache.find(key)
        if kept and not self._belongs(kept):
            plan_cache.drop(key)
            return None
        return kept

    def _belongs(self, kept: Kept) -> bool:
        """Whether a plan is for the budget and the levers of these options."""
        options, plan = self.planner.options, kept.plan
        known = 0 <= kept.lever_set < len(self.planner.lever_sets) and options.allow.issuperset(plan.proposals)
        return known and plan.budget_bytes == options.budget_bytes

    def _by_kept(
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

    def _emitted_by_kept(
        self, key: str | None, captured: CapturedCall, call: Call, situation: Situation
    ) -> EmittedCall | None:
        """The call emitted by its plan from disk; None without one, or where its graphs or compiled bytes differ."""
        kept = self._find(key)
        if kept is None or (self.planner.fuses and kept.footprint is None):  # planned ahead, and not compiled yet
            return None
        if not self.planner.fuses:
            kept = self._of_ranks(kept, captured, call, situation) or kept
        plan = self._by_kept(kept, captured, call, situation)
        region = emit_plan(plan, self.accumulation) if plan else None
        if plan is None or region is None or region.footprint != kept.footprint:
            plan_cache.drop(key)
            return None
        return EmittedCall(plan, region)
