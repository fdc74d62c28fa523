"""The plan of a training step: frozen, readable, serialisable. `Priced.solve` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import fx

from memopt.account.account import Account, Breakdown
from memopt.disk_cache import LIVE
from memopt.errors import GIB
from memopt.planning.cluster_step import ClusterStep
from memopt.planning.frontier import Frontier, Recipe, load, save, shown
from memopt.planning.options import DEFAULT_EFFORT, Effort, budget_bytes, check_effort, check_points
from memopt.planning.plan_graphs import Format, PlanDiff, StageDiff, joint_digraph, stage_diff, stage_graphs
from memopt.planning.schedule_parts import DecisionRow, ModuleRow, RegionSchedule
from memopt.solver import Effort as EffortName
from memopt.solver import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from networkx import DiGraph

    from memopt.planning.cards import OnCard
    from memopt.planning.joined import Joined
    from memopt.planning.priced_step import PricedStep, TracedStep


class PlanSource(Protocol):
    """Answers `Plan`'s methods of the same names from the step's graphs; plans made in this process have one."""

    @property
    def priced(self) -> PricedStep: ...
    def at(self, plan: Plan, budget_bytes: int, effort: Effort) -> Plan: ...
    def frontier(self, plan: Plan, points: int, effort: Effort) -> Frontier[Plan]: ...
    def recipes(self, plan: Plan) -> tuple[Recipe, ...]: ...
    def cards(self, plan: Plan) -> tuple[OnCard, ...]: ...
    def smallest_bytes(self, plan: Plan) -> int: ...


PLAIN_STEP, CAPTURE = "plain step", "one graph"
"""The first rows of a receipt: the step as the plain model runs it, in its own precision; and as it is captured, in one
graph that holds nothing beyond its last use."""


@dataclass(frozen=True)
class ReceiptRow:
    """One row of a plan's receipt: the step's peak and seconds with `lever` added to the levers of the rows before."""

    lever: str
    """Name of the lever, or `PLAIN_STEP`, `CAPTURE`; empty for the captured step if the plain step was not counted."""
    peak_bytes: int
    """Peak of the whole step."""
    seconds: float
    """Seconds of forward and backward, by the time model."""


@dataclass(frozen=True)
class Plan:
    """A training step as planned: which tensors it saves, recomputes and offloads, its peak, and its time.

    Sizes are in bytes, times in seconds. A plan made in this process also carries the captured graphs (`graphs`,
    `diff`, `at`, `frontier`); one that was loaded from a file does not."""

    model: str
    hardware: str
    budget_bytes: int
    account: Account
    plain: Breakdown
    """The peak of the same captured step with nothing recomputed."""
    planned: Breakdown
    """The peak of the planned step."""
    ceiling_bytes: int
    """The peak at the largest data-dependent sizes that the plan allows for; that of `planned` where there are none."""
    step_seconds: float
    """Forward and backward with nothing recomputed, by the time model."""
    added_seconds: float
    """Recomputation, and waiting for copies from the host."""
    held_bytes: int
    """Bytes that the forward holds until its backward, outputs included."""
    bound_seconds: float
    """Lower bound on `added_seconds` of any schedule within the budget."""
    method: str
    """The solver that found the schedule."""
    regions: tuple[RegionSchedule, ...]
    """The schedule of each captured region, in the order of their forwards."""
    modules: tuple[ModuleRow, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the plan for its reader, in sentences."""
    effort: Effort = DEFAULT_EFFORT
    levers: tuple[str, ...] = ()
    """Levers in use other than recomputation, in the order in which they were tried."""
    proposals: tuple[str, ...] = ()
    """Levers in use that change the optimizer: `memopt.wrap_optimizer` applies them."""
    receipt: tuple[ReceiptRow, ...] = ()
    """The plain step, then with one more lever per row, precision first; recomputation and offload come last. Where the
    plain step cannot be counted, it begins with the step as captured."""
    host_bytes: int = 0
    """The most host memory that the step takes at a time, for activations and parameters; not part of the budget."""
    moved_bytes: int = 0
    """Bytes that one step copies to the host, and back."""
    hosted_bytes: int = 0
    """Bytes of the frozen parameters that lie on the host."""
    brought_bytes: int = 0
    """Bytes of these that one step copies to the device."""
    host_room_bytes: int | None = None
    """The most host memory that the step may take (`host_gb`); None where it takes none, and without a limit."""
    stall_seconds: float = 0.0
    """Part of `added_seconds`: compute waits for copies."""
    host_seconds: float = 0.0
    """Time of a planned step outside of its operators, such as guards and the account; not part of `added_seconds`. 0
    on a GPU, where it overlaps with compute."""
    cluster: ClusterStep | None = None
    """The time of the step on each card of the cluster, and what bounds it; None for a plan for one card."""
    kept: tuple[tuple[str, int], ...] = ()
    """Under FSDP2, the path and the bytes of each block whose parameters stay gathered from its forward to its
    backward; those of the other blocks that FSDP2 frees are gathered twice in a step."""
    decisions: tuple[DecisionRow, ...] = ()
    """The operators that are never recomputed, since a second evaluation in another kernel might decide otherwise."""
    torch_version: str = torch.__version__
    source: PlanSource | None = field(default=None, compare=False, repr=False, metadata=LIVE)
    """The captured step; None if loaded from a file."""
    schedule: Schedule | None = field(default=None, compare=False, repr=False, metadata=LIVE)
    """The schedule of all regions together; None if loaded from a file."""

    @property
    def priced(self) -> PricedStep | None:
        """The step's graphs, with bytes and seconds for each operator; None for a plan that was loaded from a file."""
        return None if self.source is None else self.source.priced

    @property
    def captured(self) -> TracedStep | None:
        """The joint graphs that the plan is for; None for a plan that was loaded from a file."""
        return None if self.source is None else self.source.priced.traced

    @property
    def joined(self) -> Joined | None:
        """All regions of the step as one problem of the solver, in bytes and seconds; None for a plan from a file."""
        return None if self.source is None else self.source.priced.problem

    @property
    def solved(self) -> tuple[PricedStep, Schedule]:
        """The priced graphs and the schedule. Raises `ValueError` for a plan that was loaded from a file."""
        source = self._source()
        assert self.schedule is not None, "this plan has graphs but no schedule"
        return source.priced, self.schedule

    @property
    def predicted_peak_bytes(self) -> int:
        """The most that the step holds at once, in bytes."""
        return self.planned.peak_bytes

    @property
    def predicted_peak_gb(self) -> float:
        """The most that the step holds at once, in GB of 1024³ bytes: everything, with the optimizer's step."""
        return self.planned.peak_bytes / GIB

    @property
    def plain_peak_gb(self) -> float:
        """The most that the captured step holds with nothing recomputed, in GB of 1024³ bytes."""
        return self.plain.peak_bytes / GIB

    @property
    def added_time(self) -> float:
        """Time of recomputation and of waiting for the host, as a fraction of `step_seconds`, by the time model."""
        return self.added_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def host_share(self) -> float:
        """Time of Dynamo's guards and of memopt's own Python code (`host_seconds`), as a fraction of `step_seconds`."""
        return self.host_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def bound(self) -> float:
        """Lower bound on `added_time` of any schedule within the budget."""
        return self.bound_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def graphs(self) -> dict[str, tuple[fx.GraphModule, ...]]:
        """The graphs of each stage, one module per region; their `print_readable` shows code.

        "captured" and "scheduled" are joint graphs. Where passes ran, "operators" and "rewritten" are the operator
        graphs before and after them, of the regions that have one. Raises `ValueError` for a plan from a file."""
        return stage_graphs(self._source().priced.traced, self.regions)

    @overload
    def diff(self, stage: Plan | None = None, *, order: bool = False) -> PlanDiff: ...
    @overload
    def diff(self, stage: str, *, order: bool = False) -> StageDiff: ...
    def diff(self, stage: Plan | str | None = None, *, order: bool = False) -> PlanDiff | StageDiff:
        """The changes that the plan makes, by module; or those of one stage to its graphs, line by line.

        Args:
            stage: None: everything that the plan changes in the captured step, and why. Another plan, for another
                budget or of another version of the model: the changes that only one of them makes. A name:
                "scheduled", or its halves "forward" and "backward": recomputed nodes and offloads; "joint" and
                "operators": all passes on the joint and on the operator graphs; "precision": the dtype of each
                operator, with the reasons; or the name of one pass, or the label of one pipeline of passes.
            order: show nodes that only moved, and renamed temporaries, too.

        Raises `ValueError` for another name, and for a plan that was loaded from a file."""
        step = self._source().priced
        if isinstance(stage, Plan):
            return shown("plan_diffs").plans_diff(self, step, stage, stage._source().priced, order=order)
        if stage is None:
            return shown("plan_diffs").plan_diff(self, step, order=order)
        return stage_diff(step.traced, self.regions, stage, order=order)

    def networkx(self) -> DiGraph:
        """The captured joint graph as a `networkx.DiGraph`; an edge leads from a node to each node that reads it.

        Nodes are named as in `graphs["captured"]`, in a plan of several regions with the region's number before
        ("1.addmm"). Attributes of each node:

        - "region", "kind" (of the fx node: "placeholder", "get_attr" or "call_function"; "account" for what takes
          memory but is no node of the graph, such as a generator's state), "operator", "half" ("input", "forward",
          "backward"), "module" (path, "" if unknown) and "source" ("file:line" of the call, or None).
        - "bytes": memory that the node makes; 0 for a view. "seconds": one run of it, by the time model.
        - "recomputed": how often it runs beyond the first time. "held_bytes": the part of "bytes" that the forward
          leaves for the backward and the caller. "offloaded_bytes": bytes copied to the host and back.
        - "fate": "offloaded", "recomputed", "saved" for the backward, "output" of the forward, "gradient", "temporary"
          (dies within its half), "alias" of another node's memory, "fused" into the nodes that read it, or "input".

        So "seconds" sum to `step_seconds`, "held_bytes" to `held_bytes` as planned before graphs are compiled, and
        "recomputed" to `diff().recomputed`. Raises `ValueError` for a plan that was loaded from a file."""
        step, schedule = self.solved
        return joint_digraph(step.traced, step.problem, schedule)

    def at(self, budget_gb: float, *, effort: EffortName | None = None, limit_seconds: float | None = None) -> Plan:
        """The plan of the same captured step for another budget in GB of 1024³ bytes. `effort` and `limit_seconds` are
        those of `memopt.optimize`, by default the ones that this plan was made with. Raises `BudgetError` where none
        fits, and `ValueError` for a plan that was loaded from a file."""
        chosen = self._effort(effort, limit_seconds)
        return self._source().at(self, budget_bytes(budget_gb), chosen)

    def frontier(
        self, points: int = 40, *, effort: EffortName | None = None, limit_seconds: float | None = None
    ) -> Frontier[Plan]:
        """The least added time of the same captured step for each of `points` budgets: see `memopt.frontier`. `effort`
        and `limit_seconds` are as in `at`. Raises `ValueError` for a plan that was loaded from a file."""
        return self._source().frontier(self, check_points(points), self._effort(effort, limit_seconds))

    def recipes(self) -> tuple[Recipe, ...]:
        """The peaks and added times of well-known recipes, such as checkpointing every block, on the same captured
        step, by simulation. Raises `ValueError` for a plan that was loaded from a file."""
        return self._source().recipes(self)

    def cards(self) -> tuple[OnCard, ...]:
        """The same step on each known CUDA card, with all of the card's memory as the budget: whether it fits, the time
        it takes, and about how many times larger the batch (the first dimension of the inputs) could be. The latter is
        extrapolated from the smallest budgets of two larger batches.

        It traces the step and these batches under all levers, and solves for each card, which takes up to some seconds
        each. Empty for a plan for a CPU or a cluster. Raises `ValueError` unless `memopt.plan` made the plan."""
        return self._source().cards(self)

    def smallest_gb(self) -> float:
        """The smallest budget in GB of 1024³ bytes that works for this step with the levers of this plan. Raises
        `ValueError` for a plan that was loaded from a file.

        With a backend that compiles, the first call compiles the smallest plan to know what its code holds, if the plan
        is for this device; that takes as long as a first step."""
        return self.smallest_bytes() / GIB

    def smallest_bytes(self) -> int:
        """The smallest budget in bytes that works for this step. Raises `ValueError` for a plan loaded from a file."""
        return self._source().smallest_bytes(self)

    def report(self, path: str | Path, *, frontier: Frontier[Any] | None = None, cards: Sequence[OnCard] = ()) -> None:
        """Write the plan as one HTML page that needs no network: the budget, memory over the step, bytes by module,
        what the plan changes, precision, and all operators, with a search over all of it.

        Args:
            path: a file named *.html.
            frontier: what `Plan.frontier` returned, to be drawn on the page.
            cards: what `Plan.cards` returned, to be shown as a table.

        The page of a plan that was loaded from a file shows the budget only. Raises `ValueError` for a path that does
        not end in .html."""
        shown("page").report(self, path, frontier, cards)

    def explain(self, op: str | None = None) -> str:
        """Explain as text where the bytes go, and which of the largest values are saved, recomputed or offloaded. With
        `op`, explain one operator: its line of code, dtype, bytes, time, whether it is saved or recomputed, and why.

        Args:
            op: a name that the tables show, or a part of an operator's or a module's name, such as "mlp.c_fc". If
                several match, they are listed, and the one whose forward takes longest is explained.

        Raises `ValueError` if no operator matches, or if the plan was loaded from a file."""
        return shown("op_story").explain(self, op)

    def export(self, path: str | Path, format: Format | None = None) -> None:
        """Write the step into a file of another tool's format.

        Args:
            path: the file; without `format`, the end of its name says which.
            format: "snapshot" (.pickle) for pytorch.org/memory_viz; "trace" (.json) for ui.perfetto.dev and
                chrome://tracing; "dot" (.dot) for Graphviz and Netron: the joint graph, each node with its
                fate (saved, recomputed, offloaded, …).

        Raises `ValueError` for another format, and for a plan that was loaded from a file."""
        shown("exports").export(self, path, format)

    def plot_timeline(self, path: str | Path | None = None) -> Figure:
        """Draw the memory over the step, as planned and with nothing recomputed, as a matplotlib figure; with `path`
        into a file too: .svg, .png or .pdf. Raises `ModuleNotFoundError` without matplotlib (`pip install
        'memopt[picture]'`), `ValueError` for another kind of file, and for a plan that was loaded from a file."""
        return shown("pictures").timeline(self, path)

    def plot_treemap(self, path: str | Path | None = None, *, planned: bool = True) -> Figure:
        """Draw the bytes of each module at the peak, `planned` or plain; writes and raises as `plot_timeline`."""
        return shown("pictures").treemap(self, path, planned=planned)

    def _repr_html_(self) -> str:
        """The main part of the page that `report` writes, for notebooks."""
        return shown("bands").notebook(self)

    def table(self) -> str:
        """Tables as text: the bytes at the peak, with nothing recomputed and as planned, by row of the account; the
        receipt of the levers; and what each module saves, recomputes and offloads."""
        return shown("report").render(self)

    def __str__(self) -> str:
        """`table()` in at most 40 lines."""
        return str(shown("report").brief(self))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically. Raises `OSError` where the file cannot be written."""
        save(path, self)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Raises `PlanFileError`, a `ValueError`, for a file of another kind or format,
        or one that was changed or cut off since; `OSError` where it cannot be read."""
        return load(path, cls, "plan", "plan again with this version of memopt")

    def _source(self) -> PlanSource:
        if self.source is None:
            raise ValueError("this plan was loaded from a file and has no graphs; make it with memopt.plan to see them")
        return self.source

    def _effort(self, effort: EffortName | None, limit_seconds: float | None) -> Effort:
        if effort is None and limit_seconds is None:
            return self.effort
        return check_effort(effort or self.effort.name, limit_seconds)
