"""What memopt refuses, and why: all of it `ValueError`, one sentence that names the value and the mend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_HALF_UP, Decimal

GIB = 1024**3


class BudgetError(ValueError):
    """No plan keeps the step within the budget, so no step is taken.

    `budget_gb` is what was asked for, `smallest_gb` the smallest budget that works with the levers allowed (or, where
    only that is known, one that certainly works), both in GB of 1024³ bytes; `dominated_by` says what holds it up,
    `further`, in a sentence each, what would lower it, and `proposals` names for `allow` that would make this budget
    work, the combination that adds the least time first. `smallest_with` holds the smallest budget in bytes for each
    combination of proposals that was looked at: none, those that were allowed, and those that might have helped.
    """

    def __init__(
        self,
        budget_bytes: int,
        smallest_bytes: int,
        dominated_by: str,
        *,
        least: bool = True,
        further: Sequence[str] = (),
        proposals: tuple[tuple[str, ...], ...] = (),
        smallest_with: Mapping[tuple[str, ...], int] | None = None,
    ) -> None:
        self.budget_bytes, self.smallest_bytes = budget_bytes, smallest_bytes
        self.budget_gb = budget_bytes / GIB
        self.smallest_gb = smallest_bytes / GIB
        self.dominated_by = dominated_by
        self.further, self.proposals, self.smallest_with = tuple(further), proposals, dict(smallest_with or {})
        figure = f"{round_up(self.smallest_gb)} GB"
        works = f"the smallest that works is {figure}, dominated by" if least else f"{figure} leaves room for"
        needs = f"a budget of {_rounded(self.budget_gb)} GB is too small for this step: {works} {dominated_by}"
        super().__init__("; ".join([needs, *self.further]))


class CaptureError(ValueError):
    """The model's forward, or a part of it, cannot be captured as a graph."""


class UnplannedGradientError(ValueError):
    """A gradient flows into an output that the plan left out."""


def round_up(gb: float) -> str:
    """Six digits, never below the value: the figure printed must work as a budget."""
    return _rounded(gb, 6, ROUND_CEILING)


def _rounded(gb: float, digits: int = 4, rounding: str = ROUND_HALF_UP) -> str:
    """Without an exponent."""
    value = Decimal(gb)
    text = f"{value.quantize(Decimal(1).scaleb(value.adjusted() + 1 - digits), rounding=rounding):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
