"""The plan of a training step: frozen, readable, serialisable."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memopt.account.account import Account
from memopt.account.breakdown import Breakdown, breakdown
from memopt.errors import GIB
from memopt.planning.captured import Captured, Joined
from memopt.planning.frontier import Frontier
from memopt.planning.module_rows import ModuleRow, held_after_forward, module_rows
from memopt.planning.options import DEFAULT_EFFORT, Effort, budget_bytes, check_effort, check_points
from memopt.planning.plan_file import as_json, fields_from
from memopt.planning.planner import Recipe, Request, recipes, smallest, solve_on_card, split
from memopt.planning.receipt import ReceiptRow, plain_step
from memopt.planning.region_schedule import RegionSchedule, scheduled_graph
from memopt.planning.sweep import sweep
from memopt.progress import stage
from memopt.show.report import render
from memopt.solver import Effort as EffortName
from memopt.solver import OffloadSolution, Schedule, Solution, warm_up
from passes import GraphDiff, diff_graphs

FORMAT = 1
STAGES = ("operators", "rewritten", "captured", "scheduled")


@dataclass(frozen=True)
class PlanDiff:
    """What a plan changes in the captured graphs, a `GraphDiff` a region; `str` is the text of all."""

    regions: tuple[GraphDiff, ...]
    evaluated_again: int
    on_host: int = 0
    """How many values wait on the host."""

    def __bool__(self) -> bool:
        return any(self.regions)

    def summary(self) -> str:
        """What passes did, or how many ops are evaluated again and values offloaded; the views that lead to and from
        them move with them."""
        counts = {"evaluated again": self.evaluated_again, "offloaded": self.on_host}
        if any(counts.values()):
            return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return "; ".join(dict.fromkeys(region.summary() for region in self.regions if region)) or "no change"

    def __str__(self) -> str:
        return "\n".join(map(str, self.regions))


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
    effort: Effort = DEFAULT_EFFORT
    levers: tuple[str, ...] = ()
    """Those that were pulled beside recomputation: they change the captured step itself, but for offload."""
    proposals: tuple[str, ...] = ()
    """Those about the optimiser that were pulled: `memopt.wrap_optimizer` puts them around it."""
    receipt: tuple[ReceiptRow, ...] = ()
    """The step as captured, and with one lever more a row, recomputation and offload last."""
    host_bytes: int = 0
    """The most that waits on the host at a time: host memory that the step asks for, no part of the budget."""
    moved_bytes: int = 0
    """What a step copies to the host, and back."""
    stall_seconds: float = 0.0
    """Part of `added_seconds`: compute waits for those copies."""
    torch_version: str = torch.__version__
    origin: Callable[[], Captured] | None = field(default=None, compare=False, repr=False)
    """Gives the graphs that the plan is for."""
    schedule: Schedule | None = field(default=None, compare=False, repr=False)

    @property
    def captured(self) -> Captured | None:
        """The graphs that the plan is for; None if loaded."""
        return None if self.origin is None else self.origin()

    @property
    def joined(self) -> Joined | None:
        """They as one problem."""
        captured = self.captured
        return None if captured is None else captured.joined(accumulating=self.account.gradients_held)

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
        """Recomputation, and waiting for the host, as a fraction of the plain step's time, by the time model."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def bound(self) -> float:
        """The least `added_time` that any schedule within the budget could have."""
        return self.bound_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def graphs(self) -> dict[str, tuple[fx.GraphModule, ...]]:
        """The graphs of each stage, a module a region; `print_readable` shows code.

        "captured" and "scheduled" are joint graphs. Where passes were asked for, "operators" and "rewritten" are the
        operator graphs before and after them, of those regions that have one.
        """
        captured = self._live()
        joint = {
            "captured": tuple(region.module for region in captured.regions),
            "scheduled": tuple(
                scheduled_graph(region, schedule)
                for region, schedule in zip(captured.regions, self.regions, strict=True)
            ),
        }
        if not captured.operators:
            return joint
        before, after = (tuple(each.stages[end] for each in captured.operators) for end in (0, -1))
        return {"operators": before, "rewritten": after, **joint}

    def diff(self, stage: str | None = None) -> PlanDiff:
        """What a stage changed in the graphs: "scheduled" (the default) adds the nodes that are evaluated again,
        "operators" is what all passes on the operator graphs did, "precision" what gives each operator its dtype, with
        the reasons; or the name of one pass, or of a labelled pipeline.

        Raises `ValueError` for another name.
        """
        if stage in (None, "scheduled"):
            graphs = self.graphs
            again = sum(len(each.evaluations) - len(set(each.evaluations)) for each in self.regions)
            stays = sum(len(each.stays) for each in self.regions)
            return PlanDiff(tuple(map(diff_graphs, graphs["captured"], graphs["scheduled"])), again, stays)
        operators = self._live().operators
        if stage == "operators" and operators:
            return PlanDiff(tuple(diff_graphs(each.stages[0], each.stages[-1]) for each in operators), 0)
        spans = [(*span, each.reasons(str(stage))) for each in operators if (span := each.span(str(stage)))]
        if not spans:
            names = (
                ["operators", *dict.fromkeys(name for each in operators for name in each.names)] if operators else []
            )
            there = "".join(f", {name!r}" for name in names)
            raise ValueError(f"no stage {stage!r} to show; there is 'scheduled', against 'captured'{there}")
        return PlanDiff(tuple(diff_graphs(before, after, notes=reasons) for before, after, reasons in spans), 0)

    def at(self, budget_gb: float, *, effort: EffortName | None = None, limit_seconds: float | None = None) -> Plan:
        """The plan of the same captured step for another budget, looked for as hard as this one if not told otherwise.

        Raises `BudgetError`, and `ValueError` if loaded.
        """
        hard = self._effort(effort, limit_seconds)
        return make_plan(self._live(), self.account, budget_bytes(budget_gb), hard)

    def frontier(
        self, points: int = 40, *, effort: EffortName | None = None, limit_seconds: float | None = None
    ) -> Frontier:
        """The whole curve of the same captured step: see `memopt.frontier`. Raises `ValueError` if loaded."""
        return sweep(self, self._live_joined(), check_points(points), self._effort(effort, limit_seconds))

    def recipes(self) -> tuple[Recipe, ...]:
        """What the recipes of hand-written checkpointing would do on the same captured step, as simulated."""
        return recipes(self._live_joined(), self.account)

    def smallest_gb(self) -> float:
        """The smallest budget that works for this step, in GB, with the levers that this plan has pulled."""
        return self.smallest_bytes() / GIB

    def smallest_bytes(self) -> int:
        """The same in bytes."""
        return smallest(self._live_joined(), self.account)[0]

    def table(self) -> str:
        """Where every byte goes before and after, and what each module keeps and recomputes, as text."""
        return render(self)

    def __str__(self) -> str:
        return self.table()

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps({"format": FORMAT, **as_json(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Raises `ValueError` for another format."""
        try:
            values = json.loads(Path(path).read_text())
            if values.pop("format") != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            return cls(**fields_from(values))
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # no JSON, no plan, or fields of another one
            mend = "plan again with this version of memopt"
            raise ValueError(f"{path} is not a memopt plan of format {FORMAT}; {mend}") from error

    def _live(self) -> Captured:
        if (captured := self.captured) is None:
            raise ValueError("this plan was loaded from a file and has no graphs; make it with memopt.plan to see them")
        return captured

    def _live_joined(self) -> Joined:
        return self._live().joined(accumulating=self.account.gradients_held)

    def _effort(self, effort: EffortName | None, limit_seconds: float | None) -> Effort:
        if effort is None and limit_seconds is None:
            return self.effort
        return check_effort(effort or self.effort.name, limit_seconds)


def make_plan(
    captured: Captured,
    account: Account,
    budget_bytes: int,
    effort: Effort = DEFAULT_EFFORT,
    *,
    offload: bool = True,
) -> Plan:
    """The plan with the least added time whose peak, as simulated, is within the budget. Raises `BudgetError`.

    With `offload`, values may wait on the host where there is a link to it and that is faster than recomputation.
    """
    joined = captured.joined(accumulating=account.gradients_held)
    with stage("loading the solver"):
        warm_up()
    with stage("solving") as tell:
        request = Request(account, budget_bytes, effort, tell, offload)
        joined, solution, account = solve_on_card(joined, request)
    regions = split(joined, captured, solution.schedule)
    captured = captured.stepping_as([region.steps for region in regions])
    seen = captured.joined(accumulating=account.gradients_held, as_seen=True)
    return Plan(
        model=captured.model_name,
        hardware=captured.hardware.name,
        budget_bytes=budget_bytes,
        account=account,
        plain=plain_step(captured, account),
        planned=breakdown(seen.problem, solution.schedule, account),
        ceiling_bytes=breakdown(joined.problem, solution.schedule, account).peak_bytes,
        step_seconds=joined.problem.seconds,
        added_seconds=solution.added_seconds,
        held_bytes=held_after_forward(joined.problem, solution.schedule),
        bound_seconds=solution.lower_bound_seconds,
        method=solution.method,
        regions=regions,
        modules=module_rows(joined, solution.schedule),
        notes=captured.all_notes,
        effort=effort,
        **_offloading(joined, solution),
        origin=lambda: captured,
        schedule=solution.schedule,
    )


def _offloading(joined: Joined, solution: Solution) -> dict[str, Any]:
    """The plan's fields that are about the host."""
    if not isinstance(solution, OffloadSolution):
        return {}
    storages = joined.problem.storages
    return {
        "host_bytes": solution.host_bytes,
        "moved_bytes": sum(storages[each.storage].bytes for each in solution.schedule.offloads),
        "stall_seconds": solution.stall_seconds,
    }
