"""The changes of a plan for readers: to the captured step, or against another plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, ConsoleOptions, RenderResult

from memopt.account.account import Account
from memopt.planning.graph_facts import GraphFacts
from memopt.planning.pass_changes import pass_changes
from memopt.planning.plan_graphs import StageDiff, stage_diff, stage_graphs
from memopt.planning.region_schedule import RegionSchedule
from memopt.planning.schedule_changes import schedule_changes
from memopt.show.change import KEPT, OFFLOADED, RECOMPUTED, Change, between
from memopt.show.diff_text import render, summary, totals
from memopt.units import size
from passes import diff_graphs

if TYPE_CHECKING:
    from memopt.planning.captured import Captured


class Planned(Protocol):
    """What a diff reads of a plan."""

    @property
    def model(self) -> str:
        """The model's class."""

    @property
    def hardware(self) -> str:
        """The card's name."""

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes."""

    @property
    def account(self) -> Account:
        """The bytes around the captured graphs."""

    @property
    def regions(self) -> tuple[RegionSchedule, ...]:
        """The schedule of each region."""

    @property
    def kept(self) -> tuple[tuple[str, int], ...]:
        """The path and the bytes of each block that stays gathered from its forward to its backward."""


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
        return summary(self.changes)

    def text(self, stage: str = "scheduled") -> str:
        """The changes of one stage line by line, like the text of `git diff`; stages are those of `Plan.diff`, and
        those of `Plan.graphs` between two plans. Raises `ValueError` for another."""
        return str(self.of_stage(stage))

    def show(self, console: Console | None = None) -> None:
        """Print the changes, in colours and as wide as the window where that is a terminal."""
        (console or Console()).print(self)

    def __str__(self) -> str:
        return render(self._heading(), self.changes, self.modules).plain

    def __repr__(self) -> str:
        return f"<PlanDiff: {self.summary()}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render(self._heading(), self.changes, self.modules, options.max_width)

    def _heading(self) -> str:
        return f"{self.title}: {totals(self.changes)}"


def plan_diff(plan: Planned, captured: Captured, *, order: bool) -> PlanDiff:
    """The changes of a plan to the captured step: see `Plan.diff`."""
    return PlanDiff(
        f"{plan.model} on {plan.hardware} within {_budget(plan)}",
        tuple(_changes(plan, captured, order=order)),
        _modules(captured),
        lambda stage: stage_diff(captured, plan.regions, stage, order=order),
    )


def plans_diff(plan: Planned, captured: Captured, other: Planned, others: Captured, *, order: bool) -> PlanDiff:
    """The changes that only one of two plans makes: see `Plan.diff`."""

    def of_stage(stage: str) -> StageDiff:
        graphs = [stage_graphs(captured, schedules) for captured, schedules in pairs]
        if not all(stage in known for known in graphs):
            raise ValueError(f"no stage {stage!r} in both plans; there is {', '.join(map(repr, graphs[0]))}")
        before, after = (known[stage] for known in graphs)
        if len(before) != len(after):
            raise ValueError(
                f"the plans are of {len(before)} and {len(after)} regions, which cannot be compared as text"
            )
        return StageDiff(tuple(diff_graphs(old, new, order=order) for old, new in zip(before, after, strict=True)))

    pairs = ((others, other.regions), (captured, plan.regions))
    both = (_changes(other, others, order=order), _changes(plan, captured, order=order))
    modules = dict.fromkeys((*_modules(captured), *_modules(others)))
    title = f"{plan.model} on {plan.hardware}: + only within {_budget(plan)}, - only within {_budget(other)}"
    return PlanDiff(title, between(*map(tuple, both)), tuple(modules), of_stage)


def _changes(plan: Planned, captured: Captured, *, order: bool) -> Iterator[Change]:
    joined = captured.joined(accumulating=plan.account.gradients_held, meanwhile=plan.account.meanwhile)
    yield from pass_changes(captured)
    yield from schedule_changes(captured, joined, plan.regions, order=order)
    for path, nbytes in plan.kept:
        yield Change(
            KEPT, "parameters", path, "parameters", nbytes=nbytes, reason="so that its backward gathers nothing"
        )


def _modules(captured: Captured) -> tuple[str, ...]:
    """The paths of all modules that call operators, in the order of the forward as its author wrote it."""
    operators = (
        region.operators.stages[0] for region in captured.regions if region.operators and region.operators.stages
    )
    graphs = (*operators, *(region.module for region in captured.regions))
    return tuple(dict.fromkeys(path for module in graphs for path in GraphFacts(module.graph, 0).modules))


def _budget(plan: Planned) -> str:
    return size(plan.budget_bytes)
