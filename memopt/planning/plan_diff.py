"""The changes of a plan for readers: to the captured step, or against another plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult

from memopt.planning.change import OFFLOADED, RECOMPUTED, Change
from memopt.planning.plan_graphs import StageDiff
from memopt.planning.shown import shown


@dataclass(frozen=True, repr=False)
class PlanDiff:
    """The changes of a plan by operator. `str` shows them by module, folded; rich prints them in colours."""

    title: str
    changes: tuple[Change, ...]
    modules: tuple[str, ...]
    """The paths of the model's modules, in the order of the forward."""
    of_stage: Callable[[str], StageDiff] = field(compare=False)

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def recomputed(self) -> int:
        """How many operators run a second (or further) time."""
        return sum(change.times for change in self.changes if change.kind == RECOMPUTED)

    @property
    def offloaded(self) -> int:
        """How many values are copied to the host and back."""
        return sum(change.times for change in self.changes if change.kind == OFFLOADED)

    def summary(self) -> str:
        """The number of recomputed operators and offloaded values; of the other changes where there is neither."""
        return shown("diff_text").summary(self.changes)

    def text(self, stage: str = "scheduled") -> str:
        """The changes of one stage line by line, like the text of `git diff`; stages are those of `Plan.diff`, and
        those of `Plan.graphs` between two plans. Raises `ValueError` for another."""
        return str(self.of_stage(stage))

    def show(self, console: Console | None = None) -> None:
        """Print the changes, in colours and as wide as the window where that is a terminal."""
        (console or Console()).print(self)

    def __str__(self) -> str:
        return str(shown("diff_text").render(self._heading(), self.changes, self.modules))

    def __repr__(self) -> str:
        return f"<PlanDiff: {self.summary()}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield shown("diff_text").render(self._heading(), self.changes, self.modules, options.max_width)

    def _heading(self) -> str:
        return f"{self.title}: {shown('diff_text').totals(self.changes)}"
