"""The stages of a training call from its recording to its plan, each a value that is made once:

    Recorded ─trace(levers)─▶ Traced ─price(account)─▶ Priced ─solve(budget, effort)─▶ Plan ─emit_plan─▶ Emitted

Calls in one region, in several, and with a plan from disk go through these stages, the last without `solve`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from memopt.account.account import Account, in_blocks
from memopt.capture.captured_call import CapturedCall
from memopt.capture.inputs import Call, with_batches
from memopt.capture.joint import trained
from memopt.capture.operators import NothingToRewrite, Rewriting
from memopt.errors import BudgetError
from memopt.levers.all import RECOMPUTE_LEFT_OUT
from memopt.planning.call_planner import CallPlanner
from memopt.planning.cards import OnCard, on_cards
from memopt.planning.cluster_step import cluster_step
from memopt.planning.figures import plan_by, recounted, sweep, with_rows_of
from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.joined import Joined
from memopt.planning.options import DEFAULT_EFFORT, Effort
from memopt.planning.plan import Plan
from memopt.planning.planner import (
    NEGLIGIBLE,
    Request,
    added_seconds_offloading,
    least_added_seconds,
    recipes,
    smallest,
    solve_on_card,
)
from memopt.planning.priced_step import PricedStep, TracedStep
from memopt.planning.schedule_parts import split
from memopt.planning.terms import Situation
from memopt.progress import say, stage
from memopt.solver import Solution, warm_up


@dataclass(frozen=True, eq=False)
class Recorded:
    """A training call as Dynamo recorded it, with the situation that it is planned for."""

    planner: CallPlanner
    captured: CapturedCall
    call: Call
    situation: Situation

    def trace(self, levers: Rewriting) -> Traced:
        """The call rewritten by a set of levers and differentiated into joint graphs; cached. Raises `CaptureError`
        where it cannot be traced, and `NothingToRewrite` where the last lever of the set finds nothing to rewrite."""
        return Traced(self, self.planner.traced(self.captured, self.call, self.situation.hooked, levers))

    def tightest(self, batches: int = 1) -> Priced:
        """The call with a batch `batches` times as large, priced under all levers that find something to rewrite in it.
        Raises `CaptureError` as `trace` does, and where a larger batch cannot be captured on fake tensors."""
        with self.planner.terms.types(), torch.enable_grad():
            recorded = self
            if batches > 1:
                call = with_batches(self.call, batches)
                recorded = Recorded(self.planner, self.planner.capture_on_fakes(call, None), call, Situation())
            return next(recorded.from_tightest(self.planner.terms.lever_sets))

    def from_tightest(self, lever_sets: Sequence[Rewriting]) -> Iterator[Priced]:
        """Yields the call under each of these sets of levers that rewrites something, the last first, priced."""
        for levers in reversed(lever_sets):
            with suppress(NothingToRewrite):
                traced = self.trace(levers)
                yield traced.price(traced.account())

    def candidates(
        self,
        skip: Callable[[Rewriting, tuple[str, ...]], None] = lambda levers, notes: None,
        *,
        lowering_bytes: int = 0,
    ) -> Iterator[Priced]:
        """Yields the call priced under each set of levers in turn, every set with one lever more. `skip` is called
        with each set whose last lever finds nothing to rewrite, and with the reasons. `lowering_bytes`: what
        compiled code holds beyond the peak of its schedule. Raises `CaptureError` as `trace` does."""
        lever_sets = self.planner.terms.lever_sets
        for number, levers in enumerate(lever_sets, 1):
            say(
                f"lever set {number} of at most {len(lever_sets)}, which adds "
                f"{levers.levers[-1] if levers.levers else 'no lever'}"
            )
            try:
                traced = self.trace(levers)
            except NothingToRewrite as nothing:
                skip(levers, nothing.notes)
                continue
            yield traced.price(traced.account(lowering_bytes))


@dataclass(frozen=True, eq=False)
class Traced:
    """A recorded call as joint graphs under a set of levers."""

    recorded: Recorded
    step: TracedStep

    def account(self, lowering_bytes: int = 0) -> Account:
        """The account of the step, with all inputs of its graphs, and the clones of outputs that
        `DistributedDataParallel` makes; `lowering_bytes`: what compiled code holds beyond the peak of its schedule."""
        recorded, captured = self.recorded, self.recorded.captured
        accounts, buckets = recorded.planner.accounts, recorded.situation.buckets
        reached = trained(self.step.regions, captured)
        accounts.note_reached(reached)
        account = accounts.account(recorded.call, recorded.situation, reached=reached)
        return replace(
            account,
            inputs=max(account.inputs, in_blocks(captured.input_bytes, recorded.planner.terms.card)),
            lowering=lowering_bytes,
            output_clones=captured.output_bytes if buckets is not None and buckets.clone_outputs else 0,
            meanwhile=account.meanwhile + self.callers_code[0],
        )

    @property
    def callers_code(self) -> tuple[int, int]:
        """The bytes that the caller's own code allocates between forward and backward, seen or guessed; and those that
        a plan leaves free in addition, if the budget allows it, as the first number is a guess (else 0). Both are 0
        where the situation itself says how many bytes that code allocates (`Situation.meanwhile`)."""
        if self.recorded.situation.meanwhile is not None:
            return 0, 0
        return self.recorded.planner.accounts.beside.until_backward(self.step.tangent_bytes)

    def price(self, account: Account) -> Priced:
        """The step in bytes and seconds on the device that is planned for, with the chosen levers on the optimizer."""
        return Priced(self.step.price(self.recorded.planner.price_settings.under(account)), account)

    def price_for(self, plan: Plan, account: Account) -> Priced:
        """The step priced with the levers on the optimizer of `plan`, which was made earlier or by another rank."""
        planner = self.recorded.planner
        stepping = planner.optimizer_choice.stepping_of(plan)
        step = self.step.price(replace(planner.price_settings.under(account), stepping=stepping))
        return Priced(step.stepping_as([region.steps for region in plan.regions]), account)


@dataclass(frozen=True, eq=False)
class Priced:
    """A step in bytes and seconds, and its account: all that a plan is solved from."""

    step: PricedStep
    account: Account

    @property
    def levers(self) -> Rewriting:
        """The set of levers that the step was traced under."""
        return self.step.traced.rewriting

    def under(self, account: Account) -> Priced:
        """The same step, priced for another account."""
        return Priced(self.step.under(account), account)

    def hosting(self, numbers: Collection[int]) -> Priced:
        """The same step with exactly the inputs of these numbers (frozen parameters) in the host's memory."""
        step = self.step.priced_for(hosted=frozenset(numbers))
        before, now = (one.problem.problem.home_bytes for one in (self.step, step))
        return Priced(step, replace(self.account, parameters=self.account.parameters + before - now))

    def solve(
        self, budget_bytes: int, effort: Effort = DEFAULT_EFFORT, *, offload: bool = True, as_is: bool = False
    ) -> Plan:
        """The plan with the least added time whose simulated peak is within the budget. Raises `BudgetError` where
        there is none.

        With `offload`, activations and frozen parameters may go to the host where that is faster than recomputation;
        with `as_is` no further parameters do."""
        if not as_is and self.step.hostable and not self.step.settings.hosted:
            return self._solve_hosting(budget_bytes, effort, offload=offload)
        _load_solver()
        with stage("solving") as tell:
            request = Request(self.account, budget_bytes, effort, tell, offload)
            joined, solution, account = solve_on_card(self.step.problem, request)
        plan = self.planned(joined, solution, account, budget_bytes, effort)
        return plan if self.account.kept else self._with_kept_blocks(plan, offload=offload)

    def _solve_hosting(self, budget_bytes: int, effort: Effort, *, offload: bool) -> Plan:
        """As `solve`, for a step whose frozen parameters may lie on the host: with none, some or all of them there."""
        as_is, refused = self._tried(budget_bytes, effort, offload=offload)
        if as_is is not None and (not offload or as_is.added_time <= NEGLIGIBLE):
            return as_is
        if refused is not None and not offload:
            raise self._refused_without(refused)
        found = [self.hosting(numbers) for numbers in self.step.host_choices()]
        timed: list[tuple[float, int]] = []
        for number, hosting in enumerate(found):
            request = Request(hosting.account, budget_bytes)
            if not request.is_hopeless(hosting.step.problem):
                seconds = added_seconds_offloading(hosting.step.problem, request)
                timed += [] if seconds is None else [(seconds, number)]
        if as_is is None and found and len(found) - 1 not in {number for _, number in timed}:
            timed.append((math.inf, len(found) - 1))  # its refusal names the smallest budget
        for seconds, number in sorted(timed):
            if as_is is not None and as_is.added_seconds <= seconds:
                break
            plan, error = found[number]._tried(budget_bytes, effort)
            if plan is not None:
                return plan if as_is is None else min(as_is, plan, key=lambda one: one.added_seconds)
            refused = min(filter(None, (error, refused)), key=lambda one: one.smallest_bytes)
        if as_is is None:
            assert refused is not None
            raise refused.adding(*self.step.host_notes())
        return as_is

    def _tried(
        self, budget_bytes: int, effort: Effort, *, offload: bool = True
    ) -> tuple[Plan | None, BudgetError | None]:
        """The plan of `solve` with `as_is`, and None; or None and its refusal."""
        try:
            return self.solve(budget_bytes, effort, offload=offload, as_is=True), None
        except BudgetError as error:
            return None, error.with_traceback(None)

    def _refused_without(self, refused: BudgetError) -> BudgetError:
        """The refusal of a step that offloads nothing, where frozen parameters may lie on the host. If the step needs
        less with parameters there, it names that budget; if that even fits the budget given, it keeps its own figure,
        as one that is not the smallest (`BudgetError.least`)."""
        everything, budget, notes = self.hosting_all(), refused.budget_bytes, self.step.host_notes()
        hosted = None if everything is None else everything.smallest()
        if hosted is None or hosted[0] >= refused.smallest_bytes:
            return refused.adding(*notes)
        fits = hosted[0] <= budget
        least = (refused.smallest_bytes, refused.dominated_by) if fits else hosted
        return BudgetError(budget, *least, least=not fits, further=notes)

    def hosting_all(self) -> Priced | None:
        """The same step with as many frozen parameters in the host's memory as may lie there; None where none may."""
        found = self.step.host_choices()
        return self.hosting(found[-1]) if found else None

    def _with_kept_blocks(self, plan: Plan, *, offload: bool) -> Plan:
        """`plan` under FSDP2 with as many of the last blocks kept gathered, from their forward to their backward, as
        the budget has room for. Where the step waits for gathers, more blocks are kept and more is recomputed, if that
        is faster by the rates of the links. A plan for one card is returned as it is."""
        sharding = self.step.traced.sharded
        if sharding is None or sharding.cluster.mesh.dp_shard == 1:
            return plan
        blocks = len(sharding.blocks)
        room = plan.budget_bytes - plan.ceiling_bytes
        kept = max(count for count in range(blocks + 1) if sharding.kept_bytes(count) <= room)
        best = _keeping(plan, kept)
        if _seconds(_keeping(plan, blocks)) >= _seconds(best):
            return best
        more = blocks
        while more > kept:
            keeping = replace(self, account=replace(plan.account, kept=sharding.kept_bytes(more)))
            try:
                other = _keeping(keeping.solve(plan.budget_bytes, plan.effort, offload=offload), more)
                return min(best, other, key=_seconds)
            except BudgetError as refusal:
                most = sharding.kept_bytes(more) - (refusal.smallest_bytes - plan.budget_bytes)
                more = max(count for count in range(more) if count == 0 or sharding.kept_bytes(count) <= most)
        return best

    def least_seconds(self, budget_bytes: int) -> float:
        """A lower bound on the seconds of the step by any plan within the budget that offloads nothing."""
        joined = self.step.problem
        if self.step.traced.sharded is not None:
            return joined.problem.seconds
        _load_solver()
        return joined.problem.seconds + least_added_seconds(joined, Request(self.account, budget_bytes))

    def planned(self, joined: Joined, solution: Solution, account: Account, budget_bytes: int, effort: Effort) -> Plan:
        """The plan from `solution` of `joined`: of the step's problem, or of one that steps fewer parameters early."""
        regions = split(joined, self.step.traced, solution.schedule)
        step = self.step.stepping_as([region.steps for region in regions])
        source = StepOfPlan(lambda: step)
        plan = plan_by(solution, joined, step, regions, account, budget_bytes, effort, source)
        return replace(plan, notes=plan.notes + step.notes_on_stacks()) if step.settings.hosted else plan

    def smallest(self) -> tuple[int, str]:
        """The smallest budget in bytes that works, and a text on what dominates its peak."""
        return min(smallest(one.step.problem, one.account) for one in self.on_either_side())

    def on_either_side(self) -> tuple[Priced, ...]:
        """This step; and, if it has no parameters on the host but may, the step with as many there as possible."""
        everything = None if self.step.settings.hosted else self.hosting_all()
        return (self,) if everything is None else (self, everything)


def _load_solver() -> None:
    with stage("loading the solver"):
        warm_up()


@dataclass(frozen=True)
class StepOfPlan:
    """The `PlanSource` of a plan; for one from disk the step is captured and priced when first needed."""

    price: Callable[[], PricedStep]
    freed: Plan | None = None
    """Under FSDP2, the plan that keeps no block gathered, from which the smallest budget and the curve are taken."""
    tightest: Callable[[int], Priced] | None = None
    """Returns, for n, the call with a batch n times as large under all its levers; None for a plan to train by."""
    compiled_bytes: Callable[[Plan], int] | None = None
    """Compiles a plan of the step and returns the peak of its code; None where nothing is compiled here."""
    _least: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    """The result of `smallest_bytes` for compiled code, once it is known; else empty."""

    @cached_property
    def priced(self) -> PricedStep:
        return self.price()

    def at(self, plan: Plan, budget_bytes: int, effort: Effort) -> Plan:
        step = self._freed(plan)
        try:
            found = with_rows_of(plan, step.solve(budget_bytes, effort))
            assert isinstance(found.source, StepOfPlan)
            again = replace(found.source, compiled_bytes=self.compiled_bytes, tightest=self.tightest)
            return replace(found, source=again)
        except BudgetError as error:
            notes = [note for note in step.step.traced.all_notes if note.startswith(RECOMPUTE_LEFT_OUT)]
            raise error.adding(*notes) from None

    def frontier(self, plan: Plan, points: int, effort: Effort) -> Frontier[Plan]:
        step = self._freed(plan)
        return sweep(replace(self.freed or plan, account=step.account), step.step.problem, points, effort)

    def recipes(self, plan: Plan) -> tuple[Recipe, ...]:
        step = Priced(self.priced, replace(plan.account, kept=0)).hosting(())
        return recipes(step.step.problem, step.account)

    def cards(self, plan: Plan) -> tuple[OnCard, ...]:
        if self.tightest is None:
            raise ValueError(
                "plan.cards() needs a plan made by memopt.plan, which can try the levers that other cards may need"
            )
        own, tightest = Priced(self.priced, plan.account), self.tightest
        accounts = {tightest(1).step: own.hosting(()).account} | {own.step: own.account}
        steps = {step: accounts[step] for step in (own.step, *accounts)}

        def larger(batches: int) -> tuple[PricedStep, Account]:
            found = tightest(batches)
            return found.step, found.account

        return tuple(on_cards(steps, larger))

    def smallest_bytes(self, plan: Plan) -> int:
        if self.compiled_bytes is None:
            return self._freed(plan).smallest()[0]
        if not self._least:
            bare = replace(plan, account=replace(plan.account, lowering=0))
            planned = self._freed(bare).smallest()[0]
            self._least.append(max(planned, self.compiled_bytes(self.at(bare, planned, plan.effort))))
        return self._least[0]

    def _freed(self, plan: Plan) -> Priced:
        """The step with the plan's account, with all blocks freed after their forward and no parameters on the host."""
        step = self.priced if self.freed is None else self.freed.solved[0]
        return Priced(step, replace((self.freed or plan).account, kept=0)).hosting(())


def beside_freed(plan: Plan, freed: Plan) -> Plan:
    """`plan`, in which FSDP2 keeps blocks gathered, with the smallest budget and the frontier of `freed`."""
    if plan.source is None:
        return plan
    own = plan.source
    return replace(plan, source=StepOfPlan(lambda: own.priced, freed))


def _keeping(plan: Plan, count: int) -> Plan:
    """The plan with the same schedule and the last `count` blocks kept gathered until their backward."""
    step, schedule = plan.solved
    sharding = step.traced.sharded
    assert sharding is not None
    account = replace(plan.account, kept=sharding.kept_bytes(count))
    blocks = sharding.blocks[len(sharding.blocks) - count :]
    kept = tuple((block.name, block.gathered_bytes) for block in blocks)
    cluster = cluster_step(step.problem, schedule, step, account, kept=count)
    return recounted(plan, account, cluster=cluster, kept=kept)


def _seconds(plan: Plan) -> float:
    assert plan.cluster is not None
    return plan.cluster.seconds
