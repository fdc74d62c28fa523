"""The errors that memopt raises for its users' input, each a `ValueError`, and for a torch that it cannot run with.
Their messages say what to change."""

from __future__ import annotations

import copyreg
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_UP, Decimal
from typing import Any, TypeVar

GIB = 1024**3

Refusal = TypeVar("Refusal", bound=BaseException)


@dataclass(frozen=True)
class Way:
    """One change of options or settings that would make a refused step fit, as listed in `BudgetError.ways`."""

    type: str
    """Text to type or set, as in the user's code or shell."""
    peak_bytes: int
    """The smallest budget in bytes that works with the change."""
    changes: str
    """The change's other effects in words."""
    added_seconds: float | None = None
    """The seconds that it adds to a step, negative where it saves some; None where they were not estimated."""
    sentence: str = ""
    """All of this as one sentence."""


class BudgetError(ValueError):
    """Raised where no plan keeps the training step within the budget, so that no step is taken.

    The first line of the text names the budget given, the smallest one that works, and what dominates the memory; then
    come the gigabytes that are missing, sentences that explain more, and a table of the ways out.

    Attributes:
        budget_gb: the budget that was given, in GB of 1024³ bytes.
        smallest_gb: the smallest budget that works with the allowed levers, in GB of 1024³ bytes; if that is not known
            (`least=False`), a budget that certainly works.
        dominated_by: the largest part of the memory at that budget.
        ways: changes with which the step fits, the cheapest first: what to type, the peak that it gives, the time that
            it costs, what it changes.
        notes: sentences about what else the step needs or what was not tried.
        further: the notes, and the ways as sentences.
        proposals: combinations of names for `allow` that would make this budget work, the fastest first.
        least: whether `smallest_gb` is known to be the smallest budget that works.
        untried: what to type for changes that may help, and were not tried because that would take too long.
        smallest_with: the smallest budget in bytes with each combination of levers on the optimizer that was tried,
            by the names of the levers (`()`: none of them).
    """

    def __init__(
        self,
        budget_bytes: int,
        smallest_bytes: int,
        dominated_by: str,
        *,
        least: bool = True,
        further: Sequence[str] = (),
        ways: Sequence[Way] = (),
        proposals: tuple[tuple[str, ...], ...] = (),
        smallest_with: Mapping[tuple[str, ...], int] | None = None,
        untried: Sequence[str] = (),
    ) -> None:
        self.budget_bytes, self.smallest_bytes = budget_bytes, smallest_bytes
        self.budget_gb = budget_bytes / GIB
        self.smallest_gb = smallest_bytes / GIB
        self.dominated_by = dominated_by
        self.notes = tuple(further)
        self.ways = tuple(sorted(ways, key=lambda way: (way.added_seconds is None, way.added_seconds or 0.0)))
        self.proposals, self.smallest_with = proposals, dict(smallest_with or {})
        self.untried = tuple(untried)
        figure = f"{round_up(self.smallest_gb)} GB"
        works = f"the smallest that works is {figure}, dominated by" if least else f"{figure} leaves room for"
        self.least = least
        self.sentence = f"a budget of {_rounded(self.budget_gb)} GB is too small for this step: {works} {dominated_by}"
        """The first line of the text."""
        super().__init__("\n".join([self.sentence, *self._more()]))

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    @property
    def further(self) -> tuple[str, ...]:
        """The `notes`, and the `ways` out as sentences."""
        return (*self.notes, *(way.sentence for way in self.ways))

    def _more(self) -> list[str]:
        """The lines of the text after the first one."""
        lacking = max(0, self.smallest_bytes - self.budget_bytes)
        figure = f"{_rounded(lacking / GIB, 3)} GB, {lacking / max(1, self.budget_bytes):.0%} of the budget"
        lines = [f"missing: {'' if self.least else 'at most '}{figure}"] * bool(lacking)
        lines += [f"note: {note}" for note in self.notes]
        if self.ways:
            lines.append("ways out, the cheapest first:")
            lines += _row("peak", "time a step", "what to type, and what it changes")
        for way in self.ways:
            seconds = way.added_seconds
            time = "not priced" if seconds is None else f"{1e3 * seconds:+.3g} ms" if seconds else "none"
            lines += _row(f"{_rounded(way.peak_bytes / GIB, 4, ROUND_CEILING)} GB", time, way.type, way.changes)
        return lines

    def adding(self, *further: str, smallest_bytes: int | None = None) -> BudgetError:
        """The same error with further notes, and with another smallest budget in bytes if one is given."""
        smallest = self.smallest_bytes if smallest_bytes is None else smallest_bytes
        given: Any = {one: getattr(self, one) for one in ("least", "ways", "proposals", "smallest_with", "untried")}
        return BudgetError(self.budget_bytes, smallest, self.dominated_by, further=(*self.notes, *further), **given)


def _row(peak: str, time: str, *texts: str) -> list[str]:
    """The lines of a row of the table of ways: `texts` below each other, the first, to be copied, unbroken."""
    head = f"  {peak:<12}{time:<13}"
    blank = " " * len(head)
    lines = [head + texts[0]]
    for text in texts[1:]:
        lines += textwrap.wrap(text, 80, initial_indent=f"{blank}  ", subsequent_indent=f"{blank}  ")
    return lines


class TorchNamesError(ImportError):
    """Raised where this version of torch lacks private names that memopt needs."""


class RankError(ValueError):
    """Raised where another rank of the same training cannot take the step, so that no rank does."""


class CaptureError(ValueError):
    """Raised where the model's forward, or a part of it, cannot be captured as a graph."""

    undone = True
    """Whether the model, its inputs and the random generators are again as they were before the call."""


class PlanFileError(ValueError):
    """Raised for a file that is not a plan or frontier of this version of memopt, or that was changed or truncated."""


class UnplannedGradientError(ValueError):
    """Raised where a backward needs a gradient that neither the plan nor a second forward can give."""


class GradientMismatchError(ValueError):
    """Raised where the planned step gives other gradients, another loss or other buffers than the plain step does."""


class StaleOutputError(ValueError):
    """Raised where an output that is computed when it is first read is read too late: its inputs have changed since, as
    parameters do in `optimizer.step()`."""


def without_frames(error: Refusal) -> Refusal:
    """The error without its traceback, and without those of the errors that caused it: their frames would keep the
    tensors of a forward alive."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


def would_do(needed_bytes: int, budget_bytes: int) -> str:
    """The words "this budget would do, with 3.2% to spare", for a step that needs `needed_bytes`; rounded down."""
    spare = max(0, 1000 * (budget_bytes - needed_bytes) // budget_bytes) / 10
    return f"this budget would do, with {spare:.1f}% to spare"


def round_up(gb: float) -> str:
    """A budget in GB as text with six significant digits, rounded up, so that the text itself works as a budget."""
    return _rounded(gb, 6, ROUND_CEILING)


def as_text_has_it(nbytes: int) -> int:
    """The bytes of the budget that a user gives by copying the figure for `nbytes` from a message: `nbytes` or slightly
    more, since messages round GB up (`round_up`)."""
    return int(float(round_up(nbytes / GIB)) * GIB)


def _rounded(gb: float, digits: int = 4, rounding: str = ROUND_HALF_UP) -> str:
    """The value with `digits` significant digits, without an exponent."""
    value = Decimal(gb)
    text = f"{value.quantize(Decimal(1).scaleb(value.adjusted() + 1 - digits), rounding=rounding):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
