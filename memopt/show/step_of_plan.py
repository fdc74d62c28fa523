"""The step of a plan, as planned and with nothing recomputed: what it holds at every moment, and when operators run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memopt.account.account import Account
from memopt.account.breakdown import ANY_LINK, kind_of
from memopt.device.storages import storage_bytes
from memopt.planning.changes import GraphFacts, operator_name
from memopt.planning.on_card import on_card
from memopt.planning.plan import Plan
from memopt.planning.plan_views import named_nodes, op_names
from memopt.planning.priced_step import TracedStep
from memopt.planning.schedule_parts import forward_evaluations
from memopt.show.step import Copy, Evaluation, LiveRange, Step, StepMemory, StepOp, TypedOp
from memopt.solver import Link, RematProblem, Schedule
from memopt.solver.simulator import TimeLine, lifetimes, time_line
from passes.graphs.graph_text import format_dtype, format_value
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path, tensors

if TYPE_CHECKING:
    from networkx import DiGraph


def step_memory(
    problem: RematProblem, schedule: Schedule, account: Account, numbers: Sequence[int], link: Link | None
) -> StepMemory:
    """The memory of a step that runs by `schedule`. `numbers` gives the index in `Step.ops` of each op of the problem;
    `link` is the link to the host, None for a schedule without offloads. Resident bytes come from `account`; those of
    the problem are ignored."""
    times = time_line(problem, schedule, link or ANY_LINK)
    return StepMemory(
        resident={row: nbytes for row, nbytes in account.resident_rows.items() if nbytes},
        evaluations=_evaluations(problem, schedule, numbers, times),
        boundary=forward_evaluations(problem, schedule),
        ranges=_ranges(problem, schedule, numbers),
        optimizer={row: nbytes for row, nbytes in account.optimizer_rows(problem.output_bytes).items() if nbytes},
        seconds=sum(problem.ops[op].seconds for op in schedule.evaluations) + times.stall_seconds,
        copies=_copies(problem, schedule, numbers, times),
    )


def _evaluations(
    problem: RematProblem, schedule: Schedule, numbers: Sequence[int], times: TimeLine
) -> tuple[Evaluation, ...]:
    seen: set[int] = set()
    made = []
    for op, start in zip(schedule.evaluations, times.starts, strict=True):
        made.append(Evaluation(numbers[op], start, problem.ops[op].workspace_bytes, op in seen))
        seen.add(op)
    return tuple(made)


def _ranges(problem: RematProblem, schedule: Schedule, numbers: Sequence[int]) -> tuple[LiveRange, ...]:
    """The live ranges of all storages, several for one that is recomputed or fetched, in the order of their
    beginning."""
    evaluations = schedule.evaluations
    first: dict[int, int] = {}
    for position, op in enumerate(evaluations):
        first.setdefault(op, position)
    found = []
    for storage, born, dies in lifetimes(problem, evaluations, schedule.offloads):
        maker = problem.producer[storage]
        kind = kind_of(problem, storage, first=born == first[maker], fetched=evaluations[born] != maker)
        found.append(LiveRange(numbers[maker], problem.storages[storage].bytes, kind, born, dies))
    return tuple(sorted(found, key=lambda kept: kept.first))


def _copies(problem: RematProblem, schedule: Schedule, numbers: Sequence[int], times: TimeLine) -> tuple[Copy, ...]:
    """The copies to the host and back, in the order of their beginning."""
    found = []
    for offload, out, back in zip(schedule.offloads, times.out, times.back, strict=True):
        op = numbers[problem.producer[offload.storage]]
        nbytes = problem.storages[offload.storage].bytes
        found += [Copy(op, nbytes, True, *out), Copy(op, nbytes, False, *back)]
    return tuple(sorted(found, key=lambda copy: copy.start))


def step_of(plan: Plan) -> Step:
    """Everything that the step of a plan holds at every moment, as planned and with nothing recomputed.

    Raises `ValueError` for a plan that was loaded from a file.
    """
    graph, (step, schedule) = plan.networkx(), plan.solved
    captured, seen, plain = step.traced, step.seen, step.plain
    ops = tuple(_ops(captured, graph))
    number = {op.name: at for at, op in enumerate(ops)}
    save_all = Schedule.save_all(plain.problem)
    numbers, seen_numbers = ([number[name] for name in op_names(captured, joined)] for joined in (plain, seen))
    return Step(
        ops,
        step_memory(plain.problem, save_all, on_card(plain, save_all, plan.account), numbers, None),
        step_memory(seen.problem, schedule, plan.account, seen_numbers, step.settings.link),
        _parameters(captured),
        tuple(_types(captured)),
    )


def smallest_memory(plan: Plan, step: Step) -> StepMemory:
    """The memory over time of a plan's step within the smallest budget that works. `step` is what
    `step_of` returns for the plan."""
    priced, joined = plan.solved[0], plan.solved[0].problem
    number = {op.name: at for at, op in enumerate(step.ops)}
    numbers = [number[name] for name in op_names(priced.traced, joined)]
    schedule = joined.smallest.schedule
    return step_memory(joined.problem, schedule, on_card(joined, schedule, plan.account), numbers, None)


def _ops(captured: TracedStep, graph: DiGraph) -> Iterator[StepOp]:
    """The nodes of `Plan.networkx` as operators of the step: those of the joint graphs, and what takes memory beside
    them."""
    of_region = [GraphFacts(region.module.graph, number) for number, region in enumerate(captured.regions)]
    nodes = {name: (of_region[number], node) for name, number, node in named_nodes(captured)}
    for name, given in graph.nodes(data=True):
        op = StepOp(
            name,
            name,
            given["half"],
            given["module"],
            given["fate"],
            nbytes=given["bytes"],
            seconds=given["seconds"],
            recomputed=given["recomputed"],
        )
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


def _types(captured: TracedStep) -> Iterator[TypedOp]:
    """The operators of the forward with a floating-point result and their dtypes: in the operator graph of each region
    as it was rewritten last, or in the joint graph where a region has none."""
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
                yield TypedOp(node.name, operator_name(node), module_path(node), text, reason)
