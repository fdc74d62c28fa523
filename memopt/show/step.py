"""A training step as pages, pictures and exports show it, made from a plan: what runs, and what is in memory meanwhile,
by module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memopt.account.account import ANY_LINK, GRADIENTS, WORKSPACE, Account, kind_of
from memopt.device.storages import storage_bytes
from memopt.planning.changes import GraphFacts
from memopt.planning.joined import Joined, on_card
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import named_nodes, op_names
from memopt.planning.priced_step import TracedStep
from memopt.planning.schedule_parts import forward_evaluations, operator_name
from memopt.solver import Link, Schedule
from memopt.solver.simulator import lifetimes, time_line
from passes.graphs.graph_text import format_dtype, format_value
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path, tensors

if TYPE_CHECKING:
    from networkx import DiGraph

_BY_PARAMETERS = frozenset({"parameters", "optimizer state", GRADIENTS})
"""Rows of the account that are divided among modules in proportion to their parameters."""

WHY = {
    "saved": "the backward reads it, and the budget has room to hold it: recomputing it would add time",
    "recomputed": "the backward reads it, and its memory is needed for other values meanwhile; of all values to "
    "recompute, these add the least time that was found for this budget",
    "offloaded": "the backward reads it, and copying it to the host and back takes less time than recomputing it",
    "output": "the caller gets it",
    "gradient": "it is the gradient of a parameter or an input, which the optimizer reads",
    "temporary": "it is freed after its last reader, in the same half of the step that makes it",
    "alias": "it is a view of another value's memory and allocates none",
    "fused": "it runs as a part of the ops that read it, and allocates no memory",
    "input": "it exists before the step begins",
}
"""Why a plan treats a value as it does, in a clause for each fate of `Plan.networkx`."""


@dataclass(frozen=True)
class _StepOp:
    """One operator of the captured step, and what the plan does with its result."""

    name: str
    """Name of its node in the captured graph."""
    operator: str
    """Name of the operator without namespace and overload: "addmm"."""
    half: str
    """"input", "forward" or "backward"."""
    module: str
    """Path of the module that called it, or whose call it differentiates; "" outside of submodules."""
    fate: str
    """The fate of its result: one of those of `Plan.networkx`."""
    value: str = ""
    """Dtype and shape of its result: "bf16[4, 512]"."""
    source: str = ""
    """The line of the user's code that called it, as "file:line"."""
    code: str = ""
    """The text of that line."""
    nbytes: int = 0
    """Bytes of memory that it allocates; 0 for a view."""
    seconds: float = 0.0
    """Seconds of one run, by the time model."""
    recomputed: int = 0
    """How many times it runs beyond the first."""


@dataclass(frozen=True)
class _LiveRange:
    """A period in which a storage is in device memory: from the evaluation that makes it, or fetches it from the host,
    to the last one that needs it. A recomputed storage has several."""

    op: int
    """Number of the operator that makes the storage, in `Step.ops`."""
    nbytes: int
    kind: str
    """The row of the account to which its bytes belong."""
    first: int
    last: int
    """The positions in `StepMemory.evaluations` of the first and last evaluation, both included."""


@dataclass(frozen=True)
class _Evaluation:
    """One run of an operator."""

    op: int
    """Number of the operator in `Step.ops`."""
    start: float
    """Seconds from the beginning of the step."""
    workspace_bytes: int = 0
    """Bytes that its kernel takes for itself meanwhile."""
    again: bool = False
    """Whether the operator ran before in this step: this is a recomputation."""


@dataclass(frozen=True)
class _Copy:
    """One copy of an offloaded value to the host (`out=True`) or back: the index in `Step.ops` of the operator that
    made the value, its bytes, and start and end in seconds from the beginning of the step."""

    op: int
    nbytes: int
    out: bool
    start: float
    end: float


@dataclass(frozen=True)
class StepMemory:
    """Everything that a step holds at every moment. There is one moment for each evaluation, and a last one,
    `len(evaluations)`, for `optimizer.step()`."""

    resident: Mapping[str, int]
    """The bytes of the rows of the account that are held through forward and backward."""
    evaluations: tuple[_Evaluation, ...]
    boundary: int
    """The number of evaluations that belong to the forward, which are the first ones."""
    ranges: tuple[_LiveRange, ...]
    optimizer: Mapping[str, int]
    """The bytes of the rows of the account while the optimizer steps."""
    seconds: float
    """Seconds of forward and backward."""
    copies: tuple[_Copy, ...] = ()

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """The bytes held at each moment."""
        return tuple(sum(rows.values()) for rows in self.held())

    def held(self) -> Iterator[Mapping[str, int]]:
        """For each moment, the bytes held by row of the account, including the workspace of the operator that runs."""
        change: list[Counter[str]] = [Counter() for _ in range(len(self.evaluations) + 1)]
        for kept in self.ranges:
            change[kept.first][kept.kind] += kept.nbytes
            change[kept.last + 1][kept.kind] -= kept.nbytes
        now = Counter(self.resident)
        for more, one in zip(change[:-1], self.evaluations, strict=True):
            now.update(more)
            yield {**now, WORKSPACE: one.workspace_bytes}
        yield self.optimizer

    @property
    def peak(self) -> int:
        """The first moment with the most bytes."""
        return max(range(len(self.live_bytes)), key=self.live_bytes.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return self.live_bytes[self.peak]

    def alive(self, moment: int) -> Iterator[tuple[int, str, int]]:
        """The number in `Step.ops` of an operator, a row of the account and bytes, for each storage that is alive at a
        moment and for the workspace of the operator that runs; nothing at the moment of the optimizer's step."""
        for now in self.evaluations[moment : moment + 1]:
            yield from ((one.op, one.kind, one.nbytes) for one in self.ranges if one.first <= moment <= one.last)
            yield now.op, WORKSPACE, now.workspace_bytes

    def rows(self, moment: int) -> Mapping[str, int]:
        """The rows of the account that are constant before the optimizer's step, or, at that moment, its rows."""
        return self.resident if moment < len(self.evaluations) else self.optimizer


@dataclass(frozen=True)
class Step:
    """The operators of a training step, and its memory with nothing recomputed (`plain`) and as planned."""

    ops: tuple[_StepOp, ...]
    plain: StepMemory
    planned: StepMemory
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Bytes of trained parameters by the path of their module; "" for those whose module is not known."""
    types: tuple[tuple[str, str, str, str, str], ...] = ()
    """Of each operator of the forward its name, operator and module, the dtype of its result, and the reason for it."""

    def by_module(self, memory: StepMemory, moment: int) -> dict[str, Counter[str]]:
        """The bytes of each module at a moment, by row of the account; "" is for bytes of no module. They add up to the
        bytes held, except for negative rows, which are left out."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for row, nbytes in memory.rows(moment).items():
            for module, share in self.shares(row, nbytes):
                found[module][row] += share
        for op, row, nbytes in memory.alive(moment):
            found[self.ops[op].module][row] += nbytes
        kept_rows = {module: Counter({row: n for row, n in rows.items() if n > 0}) for module, rows in found.items()}
        return {module: rows for module, rows in kept_rows.items() if rows}

    def shares(self, row: str, nbytes: int) -> Iterator[tuple[str, int]]:
        """Each module's share of `nbytes` bytes of a row of the account; "" gets the bytes that belong to no module."""
        known = sum(self.parameters.values())
        if row not in _BY_PARAMETERS or not known:
            yield "", nbytes
            return
        whole = max(nbytes, known) if row == "parameters" else known
        left = nbytes
        for module, own in self.parameters.items():
            share = nbytes * own // whole
            left -= share
            yield module, share
        yield "", left


def _memory(
    ops: Sequence[_StepOp], traced: TracedStep, joined: Joined, schedule: Schedule, account: Account, link: Link | None
) -> StepMemory:
    """The memory of a step of `ops` that runs by `schedule`, over a link to the host if there are offloads."""
    problem, known = joined.problem, {op.name: at for at, op in enumerate(ops)}
    numbers = [known[name] for name in op_names(traced, joined)]
    times = time_line(problem, schedule, link or ANY_LINK)
    first: dict[int, int] = {}
    evaluations = []
    for at, (op, start) in enumerate(zip(schedule.evaluations, times.starts, strict=True)):
        evaluations.append(_Evaluation(numbers[op], start, problem.ops[op].workspace_bytes, op in first))
        first.setdefault(op, at)
    ranges = []
    for storage, born, dies in lifetimes(problem, schedule.evaluations, schedule.offloads):
        maker = problem.producer[storage]
        kind = kind_of(problem, storage, first=born == first[maker], fetched=schedule.evaluations[born] != maker)
        ranges.append(_LiveRange(numbers[maker], problem.storages[storage].bytes, kind, born, dies))
    copies = []
    for offload, out, back in zip(schedule.offloads, times.out, times.back, strict=True):
        what = numbers[problem.producer[offload.storage]], problem.storages[offload.storage].bytes
        copies += [_Copy(*what, True, *out), _Copy(*what, False, *back)]
    return StepMemory(
        resident={row: nbytes for row, nbytes in account.resident_rows.items() if nbytes},
        evaluations=tuple(evaluations),
        boundary=forward_evaluations(problem, schedule),
        ranges=tuple(sorted(ranges, key=lambda kept: kept.first)),
        optimizer={row: nbytes for row, nbytes in account.optimizer_rows(problem.output_bytes).items() if nbytes},
        seconds=sum(problem.ops[op].seconds for op in schedule.evaluations) + times.stall_seconds,
        copies=tuple(sorted(copies, key=lambda copy: copy.start)),
    )


def step_of(plan: Plan) -> Step:
    """Everything that the step of a plan holds. Raises `ValueError` for a plan that was loaded from a file."""
    graph, (step, schedule) = plan.networkx(), plan.solved
    captured, seen, plain = step.traced, step.seen, step.plain
    ops = tuple(_ops(captured, graph))
    save_all = Schedule.save_all(plain.problem)
    return Step(
        ops,
        _memory(ops, captured, plain, save_all, on_card(plain, save_all, plan.account), None),
        _memory(ops, captured, seen, schedule, plan.account, step.settings.link),
        _parameters(captured),
        tuple(_types(captured)),
    )


def smallest_memory(plan: Plan, step: Step) -> StepMemory:
    """The memory of a plan's `step` (see `step_of`) within the smallest budget that works."""
    priced, joined = plan.solved[0], plan.solved[0].problem
    schedule = joined.smallest.schedule
    return _memory(step.ops, priced.traced, joined, schedule, on_card(joined, schedule, plan.account), None)


def _ops(captured: TracedStep, graph: DiGraph) -> Iterator[_StepOp]:
    """The nodes of `Plan.networkx` as operators of the step."""
    of_region = [GraphFacts(region.module.graph, number) for number, region in enumerate(captured.regions)]
    nodes = {name: (of_region[number], node) for name, number, node in named_nodes(captured)}
    for name, given in graph.nodes(data=True):
        told = {field: given[field] for field in ("half", "module", "fate", "seconds", "recomputed")}
        op = _StepOp(name, name, nbytes=given["bytes"], **told)
        if name in nodes:
            facts, node = nodes[name]
            source, code = facts.line(node)
            value = format_value(node.meta["val"]) if "val" in node.meta else ""
            op = replace(op, operator=operator_name(node), value=value, source=source, code=code)
        yield op


def _parameters(captured: TracedStep) -> dict[str, int]:
    """Bytes of the parameters that are trained, by the module that reads them first."""
    found: Counter[str] = Counter()
    for region in captured.regions:
        given = [node for node in region.module.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        for number in sorted(region.parameter_inputs):
            path = next((path for user in given[number].users if (path := module_path(user))), "")
            found[path] += storage_bytes(given[number].meta["val"])
    return dict(found)


def _types(captured: TracedStep) -> Iterator[tuple[str, str, str, str, str]]:
    """The operators of the forward with a floating-point result, as they were rewritten last."""
    for region in captured.regions:
        rewritten = region.operators if region.operators and region.operators.stages else None
        graph = (rewritten.stages[-1] if rewritten else region.module).graph
        decisions = rewritten.decisions if rewritten else ()
        reasons = {name: reason for decision in decisions for name, reason in decision.reasons.items()}
        late = backward_nodes(graph)
        for node in graph.nodes:
            if node.op != "call_function" or node in late or "getitem" in str(node.target):
                continue
            values: Any = node.meta.get("val")
            dtype = next((value.dtype for value in tensors(values) if value.is_floating_point()), None)
            if dtype is not None:
                text = format_dtype(dtype)
                reason = reasons.get(node.name, "").removeprefix(f"{text}: ")
                yield node.name, operator_name(node), module_path(node), text, reason
