"""Weighs sets of levers, and proposals about the optimiser, against each other: the fastest plan that fits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from memopt.account.account import Account
from memopt.errors import GIB, BudgetError, round_up
from memopt.optimizers import ProposalSet
from memopt.planning.captured import Captured
from memopt.planning.make_plan import make_plan
from memopt.planning.options import Effort
from memopt.planning.plan import Plan
from memopt.planning.planner import LITTLE, smallest
from memopt.planning.receipt import plain_row, schedule_rows, writes_over
from memopt.rewrite import OFFLOAD_ACTIVATIONS, REINPLACE, Rung
from memopt.show.rows import ReceiptRow

Candidate = tuple[Rung, Captured, Account]
"""Some levers, the call as they make it, and what the step holds beside its graph."""

# How many combinations of proposals a refusal describes.
_SHOWN = 3


@dataclass
class PlanSearch:
    """The plans for one call, rung by rung from below."""

    budget_bytes: int
    effort: Effort
    allowed: frozenset[str] = frozenset()
    """Proposals that may be pulled where no rung fits."""
    combinations: Callable[[], Sequence[ProposalSet]] = tuple
    """All proposals in the order of their price."""
    narrowed: Callable[[Rung], Candidate | None] = lambda rung: None
    """The step on a rung with narrower parameters, for combinations that need it; None where it cannot be captured."""
    advice: Callable[[Sequence[Candidate]], Sequence[str]] = lambda steps: ()
    """What else would help, in a sentence each, asked for where nothing that may be pulled does."""
    notes: tuple[str, ...] = ()
    """What the plan, or the refusal, has to say anyway."""
    _steps: list[Candidate] = field(default_factory=list)
    _plans: list[tuple[Plan, Rung]] = field(default_factory=list)
    _refused: list[BudgetError] = field(default_factory=list)
    _rows: dict[tuple[str, ...], ReceiptRow] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)
    _narrow: dict[int, Candidate | None] = field(default_factory=dict)
    """By the `id` of the rung."""
    _idle: set[str] = field(default_factory=set)
    """Levers that found nothing to do: rungs above have them in name only."""

    def __post_init__(self) -> None:
        self._notes |= dict.fromkeys(self.notes)

    def skip(self, rung: Rung, notes: tuple[str, ...]) -> None:
        """The newest lever of a rung finds nothing to do, as the notes say."""
        self._idle.add(rung.levers[-1])
        self._notes |= dict.fromkeys(notes)

    def weigh(self, rung: Rung, captured: Captured, account: Account) -> Plan | None:
        """The plan on a rung, if it leaves no reason to climb any further; None where others are to be tried.

        Nothing waits on the host yet.
        """
        self._steps.append((rung, captured, account))
        self._rows[rung.levers] = plain_row(rung.levers[-1] if rung.levers else "", captured, account)
        try:
            plan = make_plan(captured, account, self.budget_bytes, self.effort, offload=False)
        except BudgetError as error:
            self._refused.append(error)
            return None
        self._plans.append((plan, rung))
        if rung.next_is_faster or plan.added_time > LITTLE:
            return None
        faster = all(_seconds(plan) <= _seconds(other) for other, below in self._plans if below.next_is_faster)
        return self._with_receipt(plan, rung) if faster else None

    def best(self) -> tuple[Plan, Rung]:
        """The plan with the shortest step of all that were weighed, with and without values that wait on the host, and
        its rung.

        Where none fits, those with the first combination of proposals that is allowed and helps. Raises `BudgetError`
        where none does, with the smallest budget of all, and with the cheapest combinations that would help.
        """
        self._offload()
        return self._fastest() if self._plans else self._with_offer()

    def _offload(self) -> None:
        """Plan the rungs with values that wait on the host, unless the step alone takes longer than the best plan."""

        def step_seconds(step: Candidate) -> float:
            return step[1].joined(accumulating=step[2].gradients_held).problem.seconds

        for rung, captured, account in sorted(self._steps, key=step_seconds):
            best = min((_seconds(plan) for plan, _ in self._plans), default=math.inf)
            if captured.link is None or step_seconds((rung, captured, account)) >= best:
                continue
            with contextlib.suppress(BudgetError):
                self._plans.append((make_plan(captured, account, self.budget_bytes, self.effort), rung))

    def _with_offer(self) -> tuple[Plan, Rung]:
        found: dict[tuple[str, ...], int] = {(): min(error.smallest_bytes for error in self._refused)}
        helpful: list[tuple[ProposalSet, int]] = []
        for chosen in self.combinations():
            allowed = self.allowed.issuperset(chosen.names)
            if not allowed and self._is_hopeless(chosen):
                continue
            least = self._least(chosen)
            if least is None:
                continue
            found[chosen.names] = least.smallest_bytes
            if allowed:
                self._refused.append(least)
            if least.smallest_bytes > self.budget_bytes:
                continue
            helpful.append((chosen, least.smallest_bytes))
            if allowed:
                return self._take(chosen)
        least = min(self._refused, key=lambda error: error.smallest_bytes)
        proposed = (_proposed(chosen, nbytes) for chosen, nbytes in helpful[:_SHOWN])
        texts = [*self._notes, *proposed, *self.advice(self._steps)]
        raise BudgetError(
            self.budget_bytes,
            least.smallest_bytes,
            least.dominated_by,
            further=texts,
            proposals=tuple(chosen.names for chosen, _ in helpful),
            smallest_with=found,
        )

    def _with(self, chosen: ProposalSet, steps: Sequence[Candidate]) -> Iterator[Candidate]:
        """The steps with the chosen proposals on them."""
        for step in steps:
            taken = self._narrowed(step[0]) if chosen.narrows else step
            if taken is not None:
                rung, captured, account = taken
                yield rung, captured.stepping_by(chosen.stepping), account

    def _is_hopeless(self, chosen: ProposalSet) -> bool:
        """Whether what is held all the time is above the budget."""
        return all(chosen.adjusted(account).resident_bytes > self.budget_bytes for _, _, account in self._steps)

    def _narrowed(self, rung: Rung) -> Candidate | None:
        if id(rung) not in self._narrow:
            self._narrow[id(rung)] = self.narrowed(rung)
        return self._narrow[id(rung)]

    def _least(self, chosen: ProposalSet) -> BudgetError | None:
        """The refusal with the chosen proposals: the smallest budget, and what dominates it. Narrow parameters are
        tried on the rung that holds least with wide ones; None where they cannot be."""
        steps = [min(self._steps, key=_smallest)] if chosen.narrows else self._steps
        found = [
            _smallest((rung, captured, chosen.adjusted(account)))
            for rung, captured, account in self._with(chosen, steps)
        ]
        return BudgetError(self.budget_bytes, *min(found)) if found else None

    def _take(self, chosen: ProposalSet) -> tuple[Plan, Rung]:
        for rung, captured, account in self._with(chosen, self._steps):
            try:
                plan = make_plan(captured, chosen.adjusted(account), self.budget_bytes, self.effort)
            except BudgetError:
                continue
            self._plans.append((replace(plan, proposals=chosen.names), rung))
        plan, rung = self._fastest()
        notes = (*map(str, chosen.priced), *_on_steps(plan))
        return replace(plan, notes=plan.notes + notes), rung

    def _fastest(self) -> tuple[Plan, Rung]:
        plan, rung = min(self._plans, key=lambda each: _seconds(each[0]))
        return self._with_receipt(plan, rung), rung

    def _with_receipt(self, plan: Plan, rung: Rung) -> Plan:
        rows = [row for levers, row in self._rows.items() if levers == rung.levers[: len(levers)]]
        rows += schedule_rows(plan)
        fresh = tuple(note for note in self._notes if note not in plan.notes)
        pulled = tuple(lever for lever in rung.levers if lever not in self._idle)
        pulled += (REINPLACE,) if writes_over(plan) else ()
        pulled += (OFFLOAD_ACTIVATIONS,) if plan.moved_bytes else ()
        return replace(plan, levers=pulled, receipt=tuple(rows), notes=plan.notes + fresh)


def _smallest(step: Candidate) -> tuple[int, str]:
    _, captured, account = step
    return smallest(captured.joined(accumulating=account.gradients_held), account)


def _on_steps(plan: Plan) -> tuple[str, ...]:
    """How many parameters are stepped before the backward's end."""
    captured = plan.captured
    if captured is None or captured.stepping is None:
        return ()
    inside = sum(len(region.steps) for region in plan.regions)
    return (f"{inside} parameters are stepped within the backward, all others at its end",)


def _seconds(plan: Plan) -> float:
    """The whole step's."""
    return plan.step_seconds + plan.added_seconds


def _proposed(chosen: ProposalSet, least_bytes: int) -> str:
    """The chosen proposals as a sentence of a refusal."""
    words = "; ".join(map(str, chosen.priced))
    return f"with {' and '.join(map(repr, chosen.names))} in allow {round_up(least_bytes / GIB)} GB would do ({words})"
