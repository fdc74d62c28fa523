"""The step of a plan, as planned and with nothing recomputed: what it holds at every moment, and when operators run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memopt.account.account import ANY_LINK, Account, kind_of
from memopt.device.storages import storage_bytes
from memopt.planning.changes import GraphFacts
from memopt.planning.joined import Joined, on_card
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import named_nodes, op_names
from memopt.planning.priced_step import TracedStep
from memopt.planning.schedule_parts import forward_evaluations, operator_name
from memopt.show.step import Copy, Evaluation, LiveRange, Step, StepMemory, StepOp
from memopt.solver import Link, Schedule
from memopt.solver.simulator import lifetimes, time_line
from passes.graphs.graph_text import format_dtype, format_value
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path, tensors

if TYPE_CHECKING:
    from networkx import DiGraph


def _memory(
    ops: Sequence[StepOp], captured: TracedStep, joined: Joined, schedule: Schedule, account: Account, link: Link | None
) -> StepMemory:
    """The memory of a step of `ops` that runs by `schedule`, over a link to the host if there are offloads."""
    problem, known = joined.problem, {op.name: at for at, op in enumerate(ops)}
    numbers = [known[name] for name in op_names(captured, joined)]
    times = time_line(problem, schedule, link or ANY_LINK)
    first: dict[int, int] = {}
    evaluations = []
    for at, (op, start) in enumerate(zip(schedule.evaluations, times.starts, strict=True)):
        evaluations.append(Evaluation(numbers[op], start, problem.ops[op].workspace_bytes, op in first))
        first.setdefault(op, at)
    ranges = []
    for storage, born, dies in lifetimes(problem, schedule.evaluations, schedule.offloads):
        maker = problem.producer[storage]
        kind = kind_of(problem, storage, first=born == first[maker], fetched=schedule.evaluations[born] != maker)
        ranges.append(LiveRange(numbers[maker], problem.storages[storage].bytes, kind, born, dies))
    copies = []
    for offload, out, back in zip(schedule.offloads, times.out, times.back, strict=True):
        what = numbers[problem.producer[offload.storage]], problem.storages[offload.storage].bytes
        copies += [Copy(*what, True, *out), Copy(*what, False, *back)]
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


def _ops(captured: TracedStep, graph: DiGraph) -> Iterator[StepOp]:
    """The nodes of `Plan.networkx` as operators of the step."""
    of_region = [GraphFacts(region.module.graph, number) for number, region in enumerate(captured.regions)]
    nodes = {name: (of_region[number], node) for name, number, node in named_nodes(captured)}
    for name, given in graph.nodes(data=True):
        told = {field: given[field] for field in ("half", "module", "fate", "seconds", "recomputed")}
        op = StepOp(name, name, nbytes=given["bytes"], **told)
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
