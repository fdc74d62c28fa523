"""The errors that memopt raises for its users' input, each a `ValueError`, and for a torch that it cannot run with.
Their messages say what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_HALF_UP, Decimal
from typing import TypeVar

GIB = 1024**3

Refusal = TypeVar("Refusal", bound=BaseException)


class BudgetError(ValueError):
    """No plan keeps the training step within the budget, so no step is taken.

    Attributes:
        budget_gb: the budget that was asked for, in GB of 1024³ bytes.
        smallest_gb: the smallest budget that works with the allowed levers, in GB of 1024³ bytes; if that is not known
            (`least=False`), a budget that certainly works.
        dominated_by: the largest part of the memory at that budget.
        further: sentences, each about a change that would lower the smallest budget.
        proposals: combinations of names for `allow` that would make this budget work, the fastest first.
        least: whether `smallest_gb` is the smallest budget that works.
        smallest_with: the smallest budget in bytes by combination of proposals, for those combinations that were
            looked at: none, the allowed ones, and ones that might have helped.
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
        self.least = least

    def adding(self, *further: str, smallest_bytes: int | None = None) -> BudgetError:
        """The same error with further sentences, and with another smallest budget in bytes if one is given."""
        return BudgetError(
            self.budget_bytes,
            self.smallest_bytes if smallest_bytes is None else smallest_bytes,
            self.dominated_by,
            least=self.least,
            further=(*self.further, *further),
            proposals=self.proposals,
            smallest_with=self.smallest_with,
        )


class TorchNamesError(ImportError):
    """This version of torch lacks private names that memopt needs."""


class RankError(ValueError):
    """Another rank of the same training cannot take the step."""


class CaptureError(ValueError):
    """The model's forward, or a part of it, cannot be captured as a graph."""

    undone = True
    """Whether the model, its inputs and the random generators are as they were before the call."""


class PlanFileError(ValueError):
    """A file is no plan or frontier that this version of memopt wrote, or was changed or cut off since."""


class UnplannedGradientError(ValueError):
    """A gradient flows into an output for which the plan has no backward, and no second forward can give it one."""


class GradientMismatchError(ValueError):
    """The planned step gave other gradients, another loss or other buffers than the plain step does."""


class StaleOutputError(ValueError):
    """An output that is computed on demand was looked at after the values that it takes had changed."""


def without_frames(error: Refusal) -> Refusal:
    """The error without the frames in which it was raised, nor those of the errors that it followed: they hold the
    tensors of a forward."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


def would_do(needed_bytes: int, budget_bytes: int) -> str:
    """The words for a change with which a step needs `needed_bytes`, which are within the budget.

    They name no smaller budget, since nobody asked for one; the spare share is rounded down."""
    return (
        f"this budget would do, with {max(0, 1000 * (budget_bytes - needed_bytes) // budget_bytes) / 10:.1f}% to spare"
    )


def round_up(gb: float) -> str:
    """The value with six digits, rounded up, so that the text works as a budget."""
    return _rounded(gb, 6, ROUND_CEILING)


def as_text_has_it(nbytes: int) -> int:
    """The bytes of the budget that a message names for `nbytes`: those of the figure that `round_up` gives, which is
    what a user types. They are no fewer."""
    return int(float(round_up(nbytes / GIB)) * GIB)


def _rounded(gb: float, digits: int = 4, rounding: str = ROUND_HALF_UP) -> str:
    """The value with `digits` significant digits, without an exponent."""
    value = Decimal(gb)
    text = f"{value.quantize(Decimal(1).scaleb(value.adjusted() + 1 - digits), rounding=rounding):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
