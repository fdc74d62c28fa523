"""Writes a recomputation schedule into a joint graph: every recomputation becomes a node of its own."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import Argument

from passes.graph_pass import GraphKind, Pass
from passes.graphs.edit import LazyCode
from passes.graphs.node_facts import graph_results, is_pure, is_random, may_write
from passes.graphs.verify import VerifyError

Kwargs = dict[str, Argument]

FORWARD = "must_be_in_forward"
BACKWARD = "must_be_in_backward"


@dataclass(frozen=True)
class ApplySchedule(Pass):
    """Runs the calls of a joint graph in the order of `evaluations`; a call that is named again is recomputed there.

    `evaluations` holds the names of the nodes that allocate memory or have side effects. All others (views, `getitem`s,
    constants) are made from the latest evaluation of what they read. The first `boundary` evaluations and the first
    `forward_outputs` results are the forward; every node is tagged as forward or backward in `meta["partitioner_tag"]`,
    as PyTorch does. A recomputed random operator draws from the generator's state at its first evaluation.

    Before:
        relu = aten.relu(addmm)
        mm = aten.mm(relu, weight)
        mm_1 = aten.mm(tangents_1, relu)
    After (`evaluations=("relu", "mm", "relu", "mm_1")`, `boundary=2`):
        relu = aten.relu(addmm)
        mm = aten.mm(relu, weight)
        relu_again = aten.relu(addmm)
        mm_1 = aten.mm(tangents_1, relu_again)
    """

    graph: ClassVar[GraphKind] = "joint"

    evaluations: tuple[str, ...]
    boundary: int
    forward_outputs: int

    def __repr__(self) -> str:
        repeated = len(self.evaluations) - len(set(self.evaluations))
        return f"{self.name}({len(self.evaluations)} evaluations, {repeated} of them recomputations)"

    def requires(self, graph_module: fx.GraphModule) -> None:
        super().requires(graph_module)
        nodes = {node.name: node for node in graph_module.graph.nodes}
        times = Counter(self.evaluations)
        mend = "make the schedule from the graph that the pass gets"
        for name in times:
            if name not in nodes:
                raise VerifyError(name, "the schedule names this node, which the graph does not have", mend)
        for node in nodes.values():
            if node.op == "call_function" and not is_pure(node):
                if not times[node.name]:
                    problem = "the schedule leaves out this node, which is random or has side effects"
                    raise VerifyError(node.name, problem, mend)
                if times[node.name] > 1 and may_write(node):
                    raise VerifyError(node.name, "the schedule repeats this node, which may write to memory", mend)

    def rewrite(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        return LazyCode(graph_module, Rewriter(self, graph_module.graph).run())


class Rewriter:
    """Writes the graph that runs a schedule, in one walk over the schedule's evaluations.

    `latest` maps each node of the old graph to the newest node that computes it in the new one, `inputs` the old
    placeholders to the new ones. Subclasses may override `before` and `after`, called at every evaluation, and
    `end_forward`."""

    def __init__(self, schedule: ApplySchedule, graph: fx.Graph) -> None:
        self.schedule = schedule
        self.old = {node.name: node for node in graph.nodes}
        self.result = graph.output_node()
        self.new = fx.Graph()
        self.latest: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.state: dict[fx.Node, fx.Node] = {}
        self.derived: set[fx.Node] = set()
        self.planned = frozenset(schedule.evaluations)
        self.times = Counter(schedule.evaluations)
        self.tag = FORWARD

    def run(self) -> fx.Graph:
        for node in self.old.values():
            if node.op == "placeholder":
                self.latest[node] = self.inputs[node] = self.new.node_copy(node)
        self.evaluate_from(0, self.schedule.boundary)
        self.end_forward()
        results = graph_results(self.result.graph)
        outputs = [self.bind(value) for value in results[: self.schedule.forward_outputs]]
        self.forget_followers()
        self.tag = BACKWARD
        self.evaluate_from(self.schedule.boundary, len(self.schedule.evaluations))
        outputs += [self.bind(value) for value in results[self.schedule.forward_outputs :]]
        returned = outputs if isinstance(self.result.args[0], list) else tuple(outputs)
        self.new.output(returned).meta.update(self.result.meta)
        self.drop_unread_elements()
        return self.new

    def evaluate_from(self, start: int, stop: int) -> None:
        for position in range(start, stop):
            self.before(position)
            self.evaluate(self.old[self.schedule.evaluations[position]])
            self.after(position)

    def before(self, position: int) -> None:
        """Called before the evaluation at `position` of the schedule is written to the new graph."""

    def after(self, position: int) -> None:
        """Called after the evaluation at `position` of the schedule is written to the new graph."""

    def end_forward(self) -> None:
        """Called after the last evaluation of the forward is written to the new graph."""

    def evaluate(self, node: fx.Node) -> None:
        again = node in self.latest
        if again and not node.users:
            return  # no node reads it: it only advances the generator, which must happen once
        self.forget_followers(node)
        args = tuple(self.bind(arg) for arg in node.args)
        kwargs = {key: self.bind(value) for key, value in node.kwargs.items()}
        name = f"{node.name}_again" if again else node.name
        if self.times[node.name] > 1 and is_random(node) and node.users:
            draw = self.repeat_random if again else self.save_random
            self.latest[node] = draw(node, name, args, kwargs)
        else:
            self.latest[node] = self.add(node, node.target, args, kwargs, name)
        self.take_out_elements(node)

    def take_out_elements(self, node: fx.Node) -> None:
        """Inserts getitems right after the call `node` for all elements of the tuple that the call returns, and of
        lists in the tuple.

        Otherwise the tuple would keep all of them alive."""
        for user in node.users:
            if self.holds(user) and user.name not in self.planned:
                self.bind(user)
                self.take_out_elements(user)

    def bind(self, value: Argument) -> Argument:
        """Returns an argument of the old graph for use in the new one: each node in it is replaced by the newest node
        of the new graph that computes it."""
        return fx.map_arg(value, self.newest)

    def newest(self, node: fx.Node) -> fx.Node:
        if node not in self.latest:
            assert node.name not in self.planned, f"the schedule reads {node.name} before it evaluates it"
            args = tuple(self.bind(arg) for arg in node.args)
            kwargs = {key: self.bind(value) for key, value in node.kwargs.items()}
            name = f"{node.name}_again" if node in self.derived else node.name
            self.latest[node] = self.add(node, node.target, args, kwargs, name, op=node.op)
            self.derived.add(node)
        return self.latest[node]

    def forget_followers(self, source: fx.Node | None = None) -> None:
        """Drops from `latest` all views and tuple elements that are made from `source` (None: from any node).

        The next call that reads one of them makes it again, from the latest evaluation of `source`."""
        if source is None:
            self.latest = {node: made for node, made in self.latest.items() if self.holds(node)}
            return
        pending = [user for user in source.users if user.name not in self.planned]
        while pending:
            follower = pending.pop()
            if self.latest.pop(follower, None) is not None:
                pending += [user for user in follower.users if user.name not in self.planned]

    def holds(self, node: fx.Node) -> bool:
        """Returns whether a node holds memory itself: an input, a scheduled call, or an element of what a scheduled
        call returns."""
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node):
            return source.name in self.planned or (source.target is operator.getitem and self.holds(source))
        return node.op == "placeholder" or node.name in self.planned

    def save_random(self, node: fx.Node, name: str, args: tuple[Argument, ...], kwargs: Kwargs) -> fx.Node:
        save: Any = torch.ops.higher_order.run_and_save_rng_state
        drawing: Any = node.target
        pair = self.add(node, save, (drawing, *args), kwargs, f"{name}_and_state")
        drawn = self.add(node, operator.getitem, (pair, 1), {}, name)
        state = self.add(node, operator.getitem, (pair, 0), {}, f"{name}_state")
        state.meta["val"] = _fake_generator_state(drawn)
        pair.meta["val"] = (state.meta["val"], drawn.meta["val"])
        self.state[node] = state
        return drawn

    def repeat_random(self, node: fx.Node, name: str, args: tuple[Argument, ...], kwargs: Kwargs) -> fx.Node:
        repeat: Any = torch.ops.higher_order.run_with_rng_state
        drawing: Any = node.target
        return self.add(node, repeat, (self.state[node], drawing, *args), kwargs, name)

    def add(
        self,
        like: fx.Node,
        target: fx.node.Target,
        args: tuple[Argument, ...],
        kwargs: Kwargs,
        name: str,
        op: str = "call_function",
    ) -> fx.Node:
        node = self.new.create_node(op, target, args, kwargs, name=name)
        node.meta = {**like.meta, "partitioner_tag": self.tag}
        return node

    def drop_unread_elements(self) -> None:
        for node in reversed(self.new.nodes):
            if node.target is operator.getitem and not node.users:
                self.new.erase_node(node)


def _fake_generator_state(drawn: fx.Node) -> torch.Tensor:
    """Returns a fake tensor like the state of the generator that made `drawn`, which is on the CPU for any device."""
    value = drawn.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    state = torch.get_rng_state() if first.device.type == "cpu" else torch.empty(16, dtype=torch.uint8)
    with first.fake_mode:
        return torch.empty(state.shape, dtype=torch.uint8)
