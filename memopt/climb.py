"""Weighs the rungs of a ladder, and what lies beyond it, against each other: the fastest plan that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from memopt.budget.account import Account
from memopt.captured import Captured
from memopt.errors import GIB, BudgetError, round_up
from memopt.levers import Rung
from memopt.options import Effort
from memopt.plan import Plan, make_plan, plain_row
from memopt.planner import smallest
from memopt.proposals import Offer
from memopt.receipt import ReceiptRow

# How many offers a refusal describes.
_SHOWN = 3
# Recomputation that adds less than this share of the step is no reason to pull another lever.
_LITTLE = 5e-3


@dataclass
class Climb:
    """The plans for one call, rung by rung from below."""

    budget_bytes: int
    effort: Effort
    allowed: frozenset[str] = frozenset()
    """Proposals that may be pulled where no rung fits."""
    offers: Callable[[], Sequence[Offer]] = tuple
    """All proposals in the order of their price."""
    _steps: list[tuple[Rung, Captured, Account]] = field(default_factory=list)
    _plans: list[tuple[Plan, Rung]] = field(default_factory=list)
    _refused: list[BudgetError] = field(default_factory=list)
    _rows: dict[tuple[str, ...], ReceiptRow] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)
    _idle: set[str] = field(default_factory=set)
    """Levers that found nothing to do: rungs above have them in name only."""

    def skip(self, rung: Rung, notes: tuple[str, ...]) -> None:
        """The newest lever of a rung finds nothing to do, as the notes say."""
        self._idle.add(rung.levers[-1])
        self._notes |= dict.fromkeys(notes)

    def weigh(self, rung: Rung, captured: Captured, account: Account) -> Plan | None:
        """The plan on a rung, if it leaves no reason to climb any further; None where others are to be tried."""
        self._steps.append((rung, captured, account))
        self._rows[rung.levers] = plain_row(rung.levers[-1] if rung.levers else "", captured, account)
        try:
            plan = make_plan(captured, account, self.budget_bytes, self.effort)
        except BudgetError as error:
            self._refused.append(error)
            return None
        self._plans.append((plan, rung))
        return self._with_receipt(plan, rung) if plan.added_time <= _LITTLE else None

    def best(self) -> tuple[Plan, Rung]:
        """The plan with the shortest step of all that were weighed, with its rung.

        Where none fits, those with the first offer that is allowed and helps. Raises `BudgetError` where none does,
        with the smallest budget of all, and with the cheapest offers that would help.
        """
        return self._fastest() if self._plans else self._with_offer()

    def _with_offer(self) -> tuple[Plan, Rung]:
        helpful: list[tuple[Offer, int]] = []
        for offer in self.offers():
            least = self._least(offer)
            if self.allowed.issuperset(offer.names):
                self._refused.append(least)
            if least.smallest_bytes > self.budget_bytes:
                continue
            helpful.append((offer, least.smallest_bytes))
            if self.allowed.issuperset(offer.names):
                return self._take(offer)
        least = min(self._refused, key=lambda error: error.smallest_bytes)
        texts = [*self._notes, *(_proposed(offer, nbytes) for offer, nbytes in helpful[:_SHOWN])]
        raise BudgetError(
            self.budget_bytes,
            least.smallest_bytes,
            least.dominated_by,
            further=texts,
            proposals=tuple(offer.names for offer, _ in helpful),
        )

    def _least(self, offer: Offer) -> BudgetError:
        """What would be refused with an offer: the smallest budget of all rungs, and what holds it up."""
        found = [
            smallest(captured.joined(accumulating=account.gradients_held), offer.adjusted(account))
            for _, captured, account in self._steps
        ]
        return BudgetError(self.budget_bytes, *min(found))

    def _take(self, offer: Offer) -> tuple[Plan, Rung]:
        for rung, captured, account in self._steps:
            try:
                plan = make_plan(captured, offer.adjusted(account), self.budget_bytes, self.effort)
            except BudgetError:
                continue
            self._plans.append((replace(plan, proposals=offer.names), rung))
        plan, rung = self._fastest()
        notes = tuple(map(str, offer.proposals))
        return replace(plan, notes=plan.notes + notes), rung

    def _fastest(self) -> tuple[Plan, Rung]:
        plan, rung = min(self._plans, key=lambda each: each[0].step_seconds + each[0].added_seconds)
        return self._with_receipt(plan, rung), rung

    def _with_receipt(self, plan: Plan, rung: Rung) -> Plan:
        rows = [row for levers, row in self._rows.items() if levers == rung.levers[: len(levers)]]
        if plan.added_seconds:
            seconds = plan.step_seconds + plan.added_seconds
            rows.append(ReceiptRow("recompute", plan.predicted_peak_bytes, seconds))
        fresh = tuple(note for note in self._notes if note not in plan.notes)
        pulled = tuple(lever for lever in rung.levers if lever not in self._idle)
        return replace(plan, levers=pulled, receipt=tuple(rows), notes=plan.notes + fresh)


def _proposed(offer: Offer, least_bytes: int) -> str:
    """An offer as a sentence of a refusal."""
    words = "; ".join(map(str, offer.proposals))
    return f"with {' and '.join(map(repr, offer.names))} in allow {round_up(least_bytes / GIB)} GB would do ({words})"
