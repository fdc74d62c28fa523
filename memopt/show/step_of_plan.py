"""The step of a plan, plain and planned, as pages, pictures and exports show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from memopt.device.storages import storage_bytes
from memopt.planning.captured import Captured
from memopt.planning.graph_facts import GraphFacts, operator_name
from memopt.planning.on_card import on_card
from memopt.planning.plan import Plan
from memopt.planning.plan_networkx import op_names
from memopt.show.step import Step, StepOp, TypedOp
from memopt.show.step_memory import step_memory
from memopt.solver import Schedule
from passes.graphs.graph_text import format_dtype, format_value
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path, tensors

if TYPE_CHECKING:
    from networkx import DiGraph


def step_of(plan: Plan) -> Step:
    """Everything that the step of a plan holds at every moment, as planned and with nothing recomputed.

    Raises `ValueError` for a plan that was loaded.
    """
    graph, captured, schedule = plan.networkx(), plan.captured, plan.schedule
    assert captured is not None
    assert schedule is not None
    ops = tuple(_ops(captured, graph))
    number = {op.name: at for at, op in enumerate(ops)}
    accumulating, meanwhile = plan.account.gradients_held, plan.account.meanwhile
    seen = captured.joined(accumulating=accumulating, meanwhile=meanwhile, as_seen=True)
    plain = captured.joined(accumulating=accumulating, meanwhile=meanwhile, as_seen=True, reinplace=False)
    save_all = Schedule.save_all(plain.problem)
    numbers, seen_numbers = ([number[name] for name in op_names(captured, joined)] for joined in (plain, seen))
    return Step(
        ops,
        step_memory(plain.problem, save_all, on_card(plain, save_all, plan.account), numbers, None),
        step_memory(seen.problem, schedule, plan.account, seen_numbers, captured.link),
        _parameters(captured),
        tuple(_types(captured)),
    )


def _ops(captured: Captured, graph: DiGraph) -> Iterator[StepOp]:
    """The nodes of the joint graphs, and what takes memory beside them."""
    nodes: dict[str, tuple[GraphFacts, fx.Node]] = {}
    several = len(captured.regions) > 1
    for number, region in enumerate(captured.regions):
        facts = GraphFacts(region.module.graph, number)
        nodes |= {f"{number}." * several + name: (facts, node) for name, node in facts.nodes.items()}
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


def _parameters(captured: Captured) -> dict[str, int]:
    """Bytes of the parameters that are trained, by the module that reads them first."""
    found: Counter[str] = Counter()
    for region in captured.regions:
        given = [node for node in region.module.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        for number in sorted(region.parameter_inputs):
            path = next((path for user in given[number].users if (path := module_path(user))), "")
            found[path] += storage_bytes(given[number].meta["val"])
    return dict(found)


def _types(captured: Captured) -> Iterator[TypedOp]:
    """The operators of the forward with a floating-point result, in the last operator graph of each region; in the
    joint graph of one that has none."""
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
