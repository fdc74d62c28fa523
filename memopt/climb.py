"""Weighs the rungs of a ladder against each other: the fastest plan that fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memopt.budget.account import Account
from memopt.captured import Captured
from memopt.errors import BudgetError
from memopt.levers import Rung
from memopt.options import Effort
from memopt.plan import Plan, make_plan, plain_row
from memopt.receipt import ReceiptRow

# Recomputation that adds less than this share of the step is no reason to pull another lever.
_LITTLE = 5e-3


@dataclass
class Climb:
    """The plans for one call, rung by rung from below."""

    budget_bytes: int
    effort: Effort
    _plans: list[tuple[Plan, Rung]] = field(default_factory=list)
    _refused: list[BudgetError] = field(default_factory=list)
    _rows: dict[tuple[str, ...], ReceiptRow] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)

    def skip(self, notes: tuple[str, ...]) -> None:
        """The newest lever of a rung finds nothing to do, as the notes say."""
        self._notes |= dict.fromkeys(notes)

    def weigh(self, rung: Rung, captured: Captured, account: Account) -> Plan | None:
        """The plan on a rung, if it leaves no reason to climb any further; None where others are to be tried."""
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

        Raises `BudgetError` where none fits, with the smallest budget of all rungs.
        """
        if not self._plans:
            least = min(self._refused, key=lambda error: error.smallest_bytes)
            raise BudgetError(self.budget_bytes, least.smallest_bytes, least.dominated_by, further=tuple(self._notes))
        plan, rung = min(self._plans, key=lambda each: each[0].step_seconds + each[0].added_seconds)
        return self._with_receipt(plan, rung), rung

    def _with_receipt(self, plan: Plan, rung: Rung) -> Plan:
        rows = [row for levers, row in self._rows.items() if levers == rung.levers[: len(levers)]]
        if plan.added_seconds:
            seconds = plan.step_seconds + plan.added_seconds
            rows.append(ReceiptRow("recompute", plan.predicted_peak_bytes, seconds))
        fresh = tuple(note for note in self._notes if note not in plan.notes)
        return replace(plan, levers=rung.levers, receipt=tuple(rows), notes=plan.notes + fresh)
