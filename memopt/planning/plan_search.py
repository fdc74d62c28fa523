"""Searches sets of levers, also on the optimizer, for the plan with the shortest step that fits the budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memopt.capture.operators import Rewriting
from memopt.errors import BudgetError, Way, would_do
from memopt.levers.all import REINPLACE, SEGMENTS_NOTE, allow_exactly
from memopt.levers.lever import Lever
from memopt.levers.optimizer_levers import PricedLevers, Wanted, changes_of, least_with_levers
from memopt.planning.figures import plain_row, rows_to, schedule_levers, writes_over
from memopt.planning.options import Effort
from memopt.planning.plan import Plan
from memopt.planning.planner import NEGLIGIBLE
from memopt.planning.stages import Priced, Recorded

# The search for suggestions in a refusal may take one part in `_SHARE` of the work of planning, at least `_AT_LEAST`
# graph nodes.
_SHARE, _AT_LEAST = 5, 1000
# The work of one try, in traces of the step: a search for the smallest schedule alone; a capture with its trace and
# search; and the same with adapters at each linear layer, whose graph is larger.
SEARCH, CAPTURE, ADAPTERS = 0.4, 2.0, 4.0
# The number of combinations of proposals that a refusal describes.
_SHOWN = 3
# A budget is near the smallest that works if it is too small by at most one part in this many of itself.
_NEAR = 100
# A plan with the levers of an earlier plan is used if its added time exceeds that of the earlier one by at most this.
_WORSE = 0.005
_AS_DECIDED = "the levers are those of the plan for other sizes of this call; no others were tried"


@dataclass(frozen=True)
class Decided:
    """The levers of a plan. A search for the same call with other sizes tries them first."""

    rewriting: Rewriting
    """The set of levers that the plan's graphs are rewritten by."""
    levers: tuple[str, ...]
    """The names of the levers that the plan uses."""
    added_time: float
    inputs: int
    """The bytes of the call's inputs: for smaller ones, fewer levers might do."""

    @classmethod
    def by(cls, plan: Plan) -> Decided | None:
        """The levers of `plan`; None for a plan with levers on the optimizer or offloads, or without its graphs."""
        if plan.captured is None or plan.proposals or plan.moved_bytes or plan.hosted_bytes:
            return None
        return cls(plan.captured.rewriting, plan.levers, plan.added_time, plan.account.inputs)


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
            return cls(max(_AT_LEAST, sum(map(_nodes_of, steps)) / _SHARE))
        return cls(math.inf if effort.name == "best" else 0.0)

    def allow(self, way: str, traces: float, step: Priced) -> bool:
        """Whether the change `way` may be tried, which takes as long as `traces` traces of `step`. If so, that work is
        subtracted from what is left; if not, the change is added to `untried`."""
        if not self.can(way, traces, step):
            return False
        self.left -= traces * _nodes_of(step)
        return True

    def can(self, way: str, traces: float, step: Priced) -> bool:
        """As `allow`, without taking the work."""
        possible = traces * _nodes_of(step) <= self.left
        self.untried += [] if possible else [way]
        return possible

    @property
    def notes(self) -> list[str]:
        """A list of one sentence, on the changes that were not tried; empty where all were tried."""
        if not self.untried:
            return []
        ways = "; ".join(self.untried)
        return [f"what may help too, but was not tried as that takes long (effort='best' tries all of it): {ways}"]


def _nodes_of(step: Priced) -> int:
    """The number of nodes in all joint graphs of a step."""
    return sum(len(region.module.graph.nodes) for region in step.step.traced.regions)


@dataclass
class PlanSearch:
    """The search for the fastest plan of one call: sets of levers are tried in order, each with one lever more."""

    budget_bytes: int
    effort: Effort
    allowed: frozenset[str] = frozenset()
    """The names of proposals (levers on the optimizer) that may be chosen where no lever set fits without them."""
    combinations: Callable[[Wanted], Iterable[PricedLevers]] = lambda wanted: ()
    """Yields combinations of proposals: of allowed ones, then the others for which its argument is true."""
    notes: tuple[str, ...] = ()
    """Notes for the plan or the refusal."""
    allow: frozenset[str] = frozenset()
    """The names of all allowed levers, to which the `allow=` that a refusal suggests adds others."""
    narrowed: Callable[[Rewriting], Priced | None] | None = None
    """The step under a lever set with narrower parameters, as some proposals need; None if not captured."""
    advice: Callable[[Sequence[Priced], bool, Tries], tuple[list[str], list[Way]]] = lambda steps, near, tries: ([], [])
    """Returns notes, and further changes that would help; called where no allowed proposal does. It is given the steps
    that were tried, whether the budget is near the smallest that works, and how much more may be tried."""
    _steps: list[Priced] = field(default_factory=list, init=False)
    _plans: list[tuple[Plan, Rewriting]] = field(default_factory=list, init=False)
    _refused: list[BudgetError] = field(default_factory=list, init=False)
    _unsolved: list[tuple[Priced, float]] = field(default_factory=list, init=False)
    """Steps of which no plan can end the search, each with a lower bound on its seconds; not solved yet."""
    _above: set[int] = field(default_factory=set, init=False)
    """The `id` of each lever set whose smallest budget, with offloading too, is above `budget_bytes`."""
    _completed: dict[tuple[str, ...], tuple[str, Priced]] = field(default_factory=dict, init=False)
    """By the names of a lever set: its last lever, and the step under the set; a row of the receipt shows them."""
    _notes: dict[str, None] = field(default_factory=dict, init=False)
    _narrowed_by_id: dict[int, Priced | None] = field(default_factory=dict, init=False)
    """The results of `narrowed`, by the `id` of the lever set."""
    _idle: set[str] = field(default_factory=set, init=False)
    """Levers that have nothing to change in this call; later lever sets contain them in name only."""

    def __post_init__(self) -> None:
        self._notes |= dict.fromkeys(self.notes)

    def fastest(self, recorded: Recorded, *, lowering_bytes: int = 0, decided: Decided | None = None) -> Plan:
        """The plan of a recorded call with the shortest step, over sets of levers and, where none of these fits, levers
        on the optimizer. The search ends with the first plan that adds next to no time. Raises `BudgetError` where no
        plan fits, and `CaptureError` where the call cannot be traced.

        Args:
            lowering_bytes: what compiled code holds beyond the peak of its schedule.
            decided: the levers of a plan for other sizes of the call. If a plan with these levers fits and adds about
                as little time, no others are tried, unless the inputs are smaller now."""
        if decided is not None and (plan := self._as_decided(recorded, decided, lowering_bytes)) is not None:
            return plan
        if recorded.planner.terms.options.passes:
            traced = recorded.trace(recorded.planner.terms.rewriting)
            bare = traced.price(traced.account(lowering_bytes))
            self._completed[bare.levers.levers] = "", bare
        for priced in recorded.candidates(self.skip, lowering_bytes=lowering_bytes):
            plan = self.consider(priced)
            if plan is not None:
                return plan
        return self.best()[0]

    def _as_decided(self, recorded: Recorded, decided: Decided, lowering_bytes: int) -> Plan | None:
        """The plan with the levers that were decided for other sizes of the call. None where the inputs are smaller
        than those were, since fewer levers might do, and where it does not fit or adds more time than that for them."""
        traced = recorded.trace(decided.rewriting)
        account = traced.account(lowering_bytes)
        if account.inputs < decided.inputs:
            return None
        with contextlib.suppress(BudgetError):
            priced = traced.price(account)
            plan = priced.solve(self.budget_bytes, self.effort, offload=False)
            if plan.added_time <= decided.added_time + _WORSE:
                levers = tuple(name for name in decided.levers if name != REINPLACE.name)
                rows = rows_to(plan, [plain_row(" + ".join(levers), priced.step.plain, priced.account)])
                new = (_AS_DECIDED, *(note for note in self._notes if note not in plan.notes))
                levers += (REINPLACE.name,) if writes_over(plan) else ()
                return replace(plan, levers=levers, receipt=rows, notes=plan.notes + new)
        return None

    def skip(self, levers: Rewriting, notes: tuple[str, ...]) -> None:
        """Record that the last lever of the set `levers` finds nothing to rewrite in this call; `notes` say why."""
        if levers.levers not in self._completed:  # else an earlier set with the same levers found something
            self._idle.add(levers.levers[-1])
            self._notes |= dict.fromkeys(notes)

    def consider(self, priced: Priced) -> Plan | None:
        """The plan of a step, without offloads, if it ends the search by adding next to no time; else None. A step of
        which a lower bound proves that no plan can do so is not solved yet, but left to `best`."""
        levers = priced.levers
        self._steps.append(priced)
        self._completed[levers.levers] = levers.levers[-1] if levers.levers else "", priced
        least = priced.least_seconds(self.budget_bytes)
        if least > (1 + NEGLIGIBLE) * _plain_seconds(priced):
            self._unsolved.append((priced, least))
            return None
        plan: Plan | None = None
        with self._refusals_of(priced):
            plan = priced.solve(self.budget_bytes, self.effort, offload=False)
            self._plans.append((plan, levers))
        if plan is None or levers.next_is_faster or plan.added_time > NEGLIGIBLE:
            return None
        self._solve_left(_seconds(plan), lambda other: other.levers.next_is_faster)
        others = [other for other, other_levers in self._plans if other_levers.next_is_faster]
        faster = all(_seconds(plan) <= _seconds(other) for other in others)
        return self._with_receipt(plan, levers) if faster else None

    @contextlib.contextmanager
    def _refusals_of(self, priced: Priced) -> Iterator[None]:
        """A context in which the refusal of a step without offloading is recorded, and not raised."""
        try:
            yield
        except BudgetError as error:
            self._refused.append(error.with_traceback(None))  # a traceback would hold the caller's frames and tensors
            if error.least:
                self._above.add(id(priced.levers))

    def _solve_left(self, seconds: float, wanted: Callable[[Priced], bool] = lambda priced: True) -> None:
        """Solve the steps left whose lower bound is below `seconds`, by bound, until a plan found is faster."""
        for priced, least in sorted(self._unsolved, key=lambda one: one[1]):
            if (least < seconds or math.isinf(seconds)) and wanted(priced):
                self._unsolved = [one for one in self._unsolved if one[0] is not priced]
                with self._refusals_of(priced):
                    plan = priced.solve(self.budget_bytes, self.effort, offload=False)
                    self._plans.append((plan, priced.levers))
                    seconds = min(seconds, _seconds(plan))

    def best(self) -> tuple[Plan, Rewriting]:
        """The plan with the shortest step of all lever sets tried, with and without offloading, and its lever set.
        Where none fits, that with the first combination of allowed levers on the optimizer that makes one fit. Raises
        `BudgetError` where none does, with the smallest budget of all and the cheapest combinations that would help."""
        self._solve_left(min((_seconds(plan) for plan, _ in self._plans), default=math.inf))
        self._offload()
        return self._fastest() if self._plans else self._with_proposals()

    def _offload(self) -> None:
        """Plan the step with offloading under each set of levers, without those for which the budget is known to be too
        small, or whose step takes as long as the best plan's even where nothing is recomputed or offloaded."""
        for priced in sorted(self._steps, key=_plain_seconds):
            best = min((_seconds(plan) for plan, _ in self._plans), default=math.inf)
            hopeless = priced.step.settings.link is None or id(priced.levers) in self._above
            if hopeless or _plain_seconds(priced) >= best:
                continue
            with contextlib.suppress(BudgetError):
                self._plans.append((priced.solve(self.budget_bytes, self.effort), priced.levers))

    def _with_proposals(self) -> tuple[Plan, Rewriting]:
        """The best plan with the first allowed proposals that make a lever set fit, and its lever set. Raises
        `BudgetError` where none do, which also describes proposals that are not allowed, as far as `Tries` allow; but
        not near the smallest budget that works, as giving a little more memory is simpler."""
        tries, lean = Tries.beside(self._steps, self.effort), min(self._steps, key=Priced.smallest)
        found: dict[tuple[str, ...], int] = {(): min(error.smallest_bytes for error in self._refused)}
        helpful: list[tuple[PricedLevers, int]] = []
        left_out: list[Collection[str]] = []

        none_helps = self._is_near(found[()]) or all(
            least_with_levers(priced.account) > self.budget_bytes for priced in self._steps
        )

        def wanted(levers: Sequence[Lever]) -> bool:
            names = tuple(lever.name for lever in levers)
            if none_helps or any(
                set(names).issuperset(fewer) for fewer in (*left_out, *(one.names for one, _ in helpful))
            ):
                return False
            possible = tries.can(_in_allow(names), self._traces(levers, lean), lean)
            left_out.extend([] if possible else [names])
            return possible

        for chosen in self.combinations(wanted):
            allowed = self.allowed.issuperset(chosen.names)
            if not allowed and all(
                chosen.adjusted(priced.account).resident_bytes > self.budget_bytes for priced in self._steps
            ):
                continue
            if not allowed and not tries.allow(_in_allow(chosen.names), self._traces(chosen.levers, lean), lean):
                left_out.append(chosen.names)
                continue
            least = self._least(chosen, self._steps if allowed else [lean])
            if least is None:
                continue
            found[chosen.names] = least.smallest_bytes
            if allowed:
                self._refused.append(least)
            if least.smallest_bytes <= self.budget_bytes:
                helpful.append((chosen, least.smallest_bytes))
                if allowed:
                    return self._take(chosen)
        least = min(self._refused, key=lambda error: error.smallest_bytes)
        proposed = [_proposed(chosen, nbytes, self.budget_bytes, self.allow) for chosen, nbytes in helpful[:_SHOWN]]
        notes, advised = self.advice(self._steps, self._is_near(least.smallest_bytes), tries)
        raise BudgetError(
            self.budget_bytes,
            least.smallest_bytes,
            least.dominated_by,
            least=least.least,
            further=[*self._notes, *least.notes, *notes, *tries.notes],
            ways=[*proposed, *advised],
            proposals=tuple(chosen.names for chosen, _ in helpful),
            smallest_with=found,
            untried=tries.untried,
        )

    def _with(self, chosen: PricedLevers, steps: Sequence[Priced]) -> Iterator[Priced]:
        """The steps with the chosen proposals applied."""
        for step in steps:
            taken = self._narrowed(step.levers) if chosen.narrows else step
            if taken is not None:
                yield Priced(taken.step.priced_for(stepping=chosen.stepping), chosen.adjusted(taken.account))

    def _traces(self, levers: Sequence[Lever], step: Priced) -> float:
        """The work of trying proposals on a step, in traces of the step; 0 where they change resident bytes only."""
        changes = changes_of(levers)
        if any(change.narrows for change in changes) and self.narrowed and id(step.levers) not in self._narrowed_by_id:
            return CAPTURE
        return SEARCH if any(change.narrows or change.in_backward for change in changes) else 0.0

    def _is_near(self, smallest_bytes: int) -> bool:
        """Whether the budget is near the smallest that works."""
        return smallest_bytes - self.budget_bytes <= self.budget_bytes // _NEAR

    def _narrowed(self, levers: Rewriting) -> Priced | None:
        """The step under a lever set with narrower parameters, captured once; None where it cannot be captured."""
        if id(levers) not in self._narrowed_by_id:
            self._narrowed_by_id[id(levers)] = self.narrowed(levers) if self.narrowed else None
        return self._narrowed_by_id[id(levers)]

    def _least(self, chosen: PricedLevers, steps: Sequence[Priced]) -> BudgetError | None:
        """An error with the smallest budget for these steps with the chosen proposals; the budget may fit. Narrower
        parameters are tried on the step with the smallest budget only; None where they cannot be captured."""
        steps = [min(steps, key=Priced.smallest)] if chosen.narrows else steps
        found = [priced.smallest() for priced in self._with(chosen, steps)]
        return BudgetError(self.budget_bytes, *min(found)) if found else None

    def _take(self, chosen: PricedLevers) -> tuple[Plan, Rewriting]:
        """The plan with the shortest step of all that were tried, with the chosen proposals, and its lever set."""
        refused: BudgetError | None = None
        for priced in self._with(chosen, self._steps):
            try:
                plan = priced.solve(self.budget_bytes, self.effort)
                self._plans.append((replace(plan, proposals=chosen.names), priced.levers))
            except BudgetError as error:  # a card's blocks may leave no room where the smallest budget leaves some
                refused = error
        if refused is not None and not self._plans:
            raise refused
        plan, levers = self._fastest()
        notes = plan.notes + tuple(map(str, chosen.each))
        if chosen.stepping is not None:
            inside = sum(len(region.steps) for region in plan.regions)
            notes += (f"{inside} parameters are stepped within the backward, all others at its end",)
        return replace(plan, notes=notes), levers

    def _fastest(self) -> tuple[Plan, Rewriting]:
        """The plan with the shortest step, and its lever set."""
        plan, levers = min(self._plans, key=lambda planned: _seconds(planned[0]))
        return self._with_receipt(plan, levers), levers

    def _with_receipt(self, plan: Plan, levers: Rewriting) -> Plan:
        """The plan with its receipt, its levers and all notes."""
        found = [lever for names, lever in self._completed.items() if names == levers.levers[: len(names)]]
        rows = [plain_row(lever, priced.step.plain, priced.account) for lever, priced in found]
        if plan.proposals:
            rows.append(plain_row(" + ".join(plan.proposals), plan.solved[0].plain, plan.account))
        segments = (SEGMENTS_NOTE,) if plan.account.expands else ()
        new = tuple(note for note in (*self._notes, *segments) if note not in plan.notes)
        used = tuple(lever for lever in levers.levers if lever not in self._idle) + schedule_levers(plan)
        return replace(plan, levers=used, receipt=rows_to(plan, rows), notes=plan.notes + new)


def _plain_seconds(priced: Priced) -> float:
    """Seconds of a step with nothing recomputed or offloaded."""
    return priced.step.problem.problem.seconds


def _seconds(plan: Plan) -> float:
    """Seconds of the whole step."""
    return plan.step_seconds + plan.added_seconds


def _in_allow(names: Iterable[str]) -> str:
    """The names of proposals as the user gives them, in words: "'a' and 'b' in allow"."""
    return f"{' and '.join(map(repr, names))} in allow"


def _proposed(chosen: PricedLevers, least_bytes: int, budget_bytes: int, allow: frozenset[str]) -> Way:
    """The chosen proposals as a way out of a refusal."""
    sentence = f"with {_in_allow(chosen.names)} {would_do(least_bytes, budget_bytes)} ({chosen})"
    return Way(allow_exactly({*allow, *chosen.names}), least_bytes, chosen.effect, chosen.added_seconds, sentence)
