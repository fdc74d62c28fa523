"""The plan of a training step: frozen, readable, serialisable."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from memopt.budget.account import Account
from memopt.budget.breakdown import Breakdown
from memopt.emit.partition import RegionSchedule, scheduled_graph
from memopt.errors import GIB
from memopt.solver import Schedule
from passes import GraphDiff, diff_graphs

if TYPE_CHECKING:
    from memopt.planner import Captured, Joined

FORMAT = 1
STAGES = ("captured", "scheduled")


@dataclass(frozen=True)
class ModuleRow:
    """One module's share of the plan: bytes saved for the backward, bytes and ops evaluated again, seconds of each."""

    path: str
    ops: int = 0
    saved_bytes: int = 0
    recomputed_bytes: int = 0
    recomputed_ops: int = 0
    seconds: float = 0.0
    added_seconds: float = 0.0


@dataclass(frozen=True)
class PlanDiff:
    """What a plan changes in the captured graphs, a `GraphDiff` a region; `str` is the text of all."""

    regions: tuple[GraphDiff, ...]
    evaluated_again: int

    def __bool__(self) -> bool:
        return any(self.regions)

    def summary(self) -> str:
        """How many ops are evaluated again; the views that lead to and from them move with them."""
        return f"{self.evaluated_again} evaluated again" if self.evaluated_again else "no change"

    def __str__(self) -> str:
        return "\n".join(map(str, self.regions))


@dataclass(frozen=True)
class Recipe:
    """A way to choose by hand what to recompute: its name, the step's peak, its added time as a fraction."""

    name: str
    peak_gb: float
    added_time: float


@dataclass(frozen=True)
class Plan:
    """What is kept, what is evaluated again, what the step will hold and take. Sizes in bytes, times in seconds.

    A plan made in this process also carries the captured graphs (`graphs`, `diff`); one that was loaded does not.
    """

    model: str
    hardware: str
    budget_bytes: int
    account: Account
    plain: Breakdown
    """The peak of the same captured step with nothing recomputed."""
    planned: Breakdown
    ceiling_bytes: int
    """The peak at the largest data-dependent sizes that the plan allows for; where there are none, the predicted."""
    step_seconds: float
    added_seconds: float
    held_bytes: int
    """What the forward keeps until its backward, outputs included."""
    bound_seconds: float
    """No schedule within the budget adds less than this: a lower bound."""
    method: str
    regions: tuple[RegionSchedule, ...]
    modules: tuple[ModuleRow, ...]
    notes: tuple[str, ...] = ()
    torch_version: str = torch.__version__
    captured: Captured | None = field(default=None, compare=False, repr=False)
    joined: Joined | None = field(default=None, compare=False, repr=False)
    schedule: Schedule | None = field(default=None, compare=False, repr=False)

    @property
    def predicted_peak_bytes(self) -> int:
        return self.planned.peak_bytes

    @property
    def predicted_peak_gb(self) -> float:
        """The most that the step holds at once, in GB of 1024³ bytes: everything, from the parameters to the last
        temporary of the optimiser."""
        return self.planned.peak_bytes / GIB

    @property
    def plain_peak_gb(self) -> float:
        """The same for the captured step with nothing recomputed."""
        return self.plain.peak_bytes / GIB

    @property
    def added_time(self) -> float:
        """Recomputation as a fraction of the plain step's time, by the time model."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def bound(self) -> float:
        """The least `added_time` that any schedule within the budget could have."""
        return self.bound_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def graphs(self) -> dict[str, tuple[fx.GraphModule, ...]]:
        """The joint graphs of each stage ("captured", "scheduled"), a module a region; `print_readable` shows code."""
        captured = self._live()
        return {
            "captured": tuple(region.module for region in captured.regions),
            "scheduled": tuple(
                scheduled_graph(region, schedule)
                for region, schedule in zip(captured.regions, self.regions, strict=True)
            ),
        }

    def diff(self, stage: str | None = None) -> PlanDiff:
        """What a stage changed in the graphs: "scheduled" (the default) adds the nodes that are evaluated again."""
        if stage not in (None, "scheduled"):
            raise ValueError(f"no stage {stage!r} to show; there is {STAGES[1]!r}, against {STAGES[0]!r}")
        graphs = self.graphs
        again = sum(len(each.evaluations) - len(set(each.evaluations)) for each in self.regions)
        return PlanDiff(tuple(map(diff_graphs, graphs["captured"], graphs["scheduled"])), again)

    def at(self, budget_gb: float) -> Plan:
        """The plan of the same captured step for another budget. Raises `BudgetError`, and `ValueError` if loaded."""
        from memopt.options import budget_bytes
        from memopt.planner import make_plan

        return make_plan(self._live(), self.account, budget_bytes(budget_gb))

    def recipes(self) -> tuple[Recipe, ...]:
        """What the recipes of hand-written checkpointing would do on the same captured step, as simulated."""
        from memopt.planner import recipes

        return recipes(self._live(), self.account)

    def smallest_gb(self) -> float:
        """The smallest budget that works for this step, in GB."""
        from memopt.planner import smallest_budget

        return smallest_budget(self._live(), self.account) / GIB

    def table(self) -> str:
        """Where every byte goes before and after, and what each module keeps and recomputes, as text."""
        from memopt.report import render

        return render(self)

    def __str__(self) -> str:
        return self.table()

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps({"format": FORMAT, **_as_json(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Raises `ValueError` for another format."""
        try:
            values = json.loads(Path(path).read_text())
            if values.pop("format") != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            return _from_json(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # no JSON, no plan, or fields of another one
            mend = "plan again with this version of memopt"
            raise ValueError(f"{path} is not a memopt plan of format {FORMAT}; {mend}") from error

    def _live(self) -> Captured:
        if self.captured is None:
            raise ValueError("this plan was loaded from a file and has no graphs; make it with memopt.plan to see them")
        return self.captured


_LIVE = ("captured", "joined", "schedule")


def _as_json(plan: Plan) -> dict[str, Any]:
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__ if name not in _LIVE}
    for name in ("account", "plain", "planned"):
        values[name] = asdict(values[name])
    for name in ("regions", "modules"):
        values[name] = [asdict(value) for value in values[name]]
    return values


def _from_json(values: dict[str, Any]) -> Plan:
    def breakdown(row: dict[str, Any]) -> Breakdown:
        return Breakdown(row["peak_bytes"], row["at"], tuple((name, size) for name, size in row["rows"]))

    def region(row: dict[str, Any]) -> RegionSchedule:
        return RegionSchedule(row["fingerprint"], tuple(row["evaluations"]), row["boundary"])

    return Plan(
        **{
            **values,
            "account": Account(**values["account"]),
            "plain": breakdown(values["plain"]),
            "planned": breakdown(values["planned"]),
            "regions": tuple(map(region, values["regions"])),
            "modules": tuple(ModuleRow(**row) for row in values["modules"]),
            "notes": tuple(values["notes"]),
        }
    )
