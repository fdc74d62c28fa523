"""Writes a schedule into a joint graph: recomputations, the copies of values to the host and back, and where compute
waits for these become nodes of their own."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import Argument

from passes.graph_pass import GraphKind, Pass
from passes.graphs.edit import LazyCode, on_stored_values
from passes.graphs.node_facts import graph_results, is_pure, is_random, may_write, tensors
from passes.graphs.verify import VerifyError
from passes.ops.offload_ops import AWAIT_BACK, AWAIT_OUT, COPY_BACK, COPY_OUT

Kwargs = dict[str, Argument]

FORWARD = "must_be_in_forward"
BACKWARD = "must_be_in_backward"


@dataclass(frozen=True)
class HostStay:
    """One offload of a value to the host. Its fields say when the copies start and are waited for, as positions in the
    schedule's list of evaluations."""

    value: str
    """The node whose tensor is offloaded: one of the scheduled calls, or an element of its results; or an input that
    lies on the host, of which there is a copy back only."""
    out_after: int
    """The copy out starts after this position; -1 before the first one."""
    freed_before: int
    """Before this position compute waits for the copy out, and the device memory is freed."""
    fetch_from: int
    """The copy back, into new memory, starts before this position."""
    back_before: int
    """Before this position compute waits for the copy back; from here on the value is read from it."""


@dataclass(frozen=True)
class ApplySchedule(Pass):
    """Runs the calls of a joint graph in the order of `evaluations`; a call that is named again is recomputed there.

    `evaluations` holds the names of the nodes that allocate memory or have side effects. All others (views, `getitem`s,
    constants) are made from the latest evaluation of what they read. The first `boundary` evaluations and the first
    `forward_outputs` results are the forward; every node is tagged as forward or backward in `meta["partitioner_tag"]`,
    as PyTorch does. A recomputed random operator draws from the generator's state at its first evaluation.

    Values are offloaded to the host as `stays` says. One with `freed_before == boundary` is freed at the end of the
    forward, one with `fetch_from == boundary` is fetched at the beginning of the backward.

    Before:
        relu = aten.relu(addmm)
        mm = aten.mm(relu, weight)
        mm_1 = aten.mm(tangents_1, relu)
    After (`evaluations=("relu", "mm", "relu", "mm_1")`, `boundary=2`):
        relu = aten.relu(addmm)
        mm = aten.mm(relu, weight)
        relu_again = aten.relu(addmm)
        mm_1 = aten.mm(tangents_1, relu_again)
    After (`evaluations=("relu", "mm", "mm_1")`, `boundary=2`, `stays=(HostStay("relu", 0, 2, 2, 2),)`):
        relu = aten.relu(addmm)
        relu_out = memopt.copy_out(relu)
        mm = aten.mm(relu, weight)
        relu_host = memopt.await_out(relu_out, relu)
        relu_fetched = memopt.copy_back(relu_host, cpu)
        relu_back = memopt.await_back(relu_fetched, relu_host)
        mm_1 = aten.mm(tangents_1, relu_back)
    """

    graph: ClassVar[GraphKind] = "joint"

    evaluations: tuple[str, ...]
    boundary: int
    forward_outputs: int
    stays: tuple[HostStay, ...] = ()

    def __repr__(self) -> str:
        repeated = len(self.evaluations) - len(set(self.evaluations))
        offloads = f", {len(self.stays)} offloads" if self.stays else ""
        return f"{self.name}({len(self.evaluations)} evaluations, {repeated} of them recomputations{offloads})"

    def requires(self, graph_module: fx.GraphModule) -> None:
        super().requires(graph_module)
        nodes = {node.name: node for node in graph_module.graph.nodes}
        times = Counter(self.evaluations)
        mend = "make the schedule from the graph that the pass gets"
        for name in (*times, *(stay.value for stay in self.stays)):
            if name not in nodes:
                what = "the schedule" if name in times else "an offload"
                raise VerifyError(name, f"{what} names this node, which the graph does not have", mend)
        for node in nodes.values():
            if node.op == "call_function" and not is_pure(node):
                if not times[node.name]:
                    problem = "the schedule leaves out this node, which is random or has side effects"
                    raise VerifyError(node.name, problem, mend)
                if times[node.name] > 1 and may_write(node):
                    raise VerifyError(node.name, "the schedule repeats this node, which may write to memory", mend)
        for stay in self.stays:
            first = -1 if nodes[stay.value].op == "placeholder" else 0
            if not first <= stay.out_after < stay.freed_before <= stay.fetch_from <= stay.back_before:
                problem = (
                    f"{stay} must be copied to the host, freed and fetched in this order: out_after < freed_before <= "
                    "fetch_from <= back_before"
                )
                raise VerifyError(stay.value, problem, mend)

    def rewrite(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        with on_stored_values(graph_module.graph):
            return LazyCode(graph_module, _Rewriter(self, graph_module.graph).run())


class _Rewriter:
    """Writes the graph that runs a schedule, in one walk over the schedule's evaluations. `latest` maps each node of
    the old graph to the newest node that computes it in the new one, `inputs` the old placeholders to the new ones."""

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
        # An input that is offloaded lies on the host already.
        self.sent = [stay for stay in schedule.stays if self.old[stay.value].op != "placeholder"]
        self.went: dict[HostStay, fx.Node] = {}
        """Per offload: the node that was copied out. `host` has its copy on the host, `fetched` the copy back."""
        self.host: dict[HostStay, fx.Node] = {}
        self.fetched: dict[HostStay, fx.Node] = {}

    def run(self) -> fx.Graph:
        for node in self.old.values():
            if node.op == "placeholder":
                self.latest[node] = self.inputs[node] = self.new.node_copy(node)
        self.evaluate_from(0, self.schedule.boundary)
        self.free(self.schedule.boundary)
        results = graph_results(self.result.graph)
        outputs = list(fx.map_arg(results[: self.schedule.forward_outputs], self.newest))
        self.forget_followers()
        self.tag = BACKWARD
        self.evaluate_from(self.schedule.boundary, len(self.schedule.evaluations))
        outputs += fx.map_arg(results[self.schedule.forward_outputs :], self.newest)
        returned = outputs if isinstance(self.result.args[0], list) else tuple(outputs)
        self.new.output(returned).meta.update(self.result.meta)
        self.drop_unread_elements()
        return self.new

    def evaluate_from(self, start: int, stop: int) -> None:
        for position in range(start, stop):
            if position != self.schedule.boundary:
                self.free(position)
            self.fetch(position)
            self.evaluate(self.old[self.schedule.evaluations[position]])
            self.send(position)

    def send(self, position: int) -> None:
        """Starts the copies out that start after a position."""
        for stay in _due(self.sent, lambda stay: stay.out_after == position, lambda stay: stay.freed_before):
            self.went[stay] = self.newest(self.old[stay.value])
            self.host[stay] = self.transfer(stay, COPY_OUT, (self.went[stay],), "out")

    def free(self, position: int) -> None:
        """Waits for the copies out of the values that are freed before a position."""
        for stay in _due(self.sent, lambda stay: stay.freed_before == position, lambda stay: stay.out_after):
            self.host[stay] = self.transfer(stay, AWAIT_OUT, (self.host[stay], self.went[stay]), "host")

    def fetch(self, position: int) -> None:
        """Starts the copies back that start before a position, and waits for those that are read from there on."""
        stays = self.schedule.stays
        for stay in _due(stays, lambda stay: stay.fetch_from == position, lambda stay: stay.back_before):
            value = self.old[stay.value]
            host = self.inputs[value] if value.op == "placeholder" else self.host[stay]
            device = next(tensors(value.meta["val"])).device
            self.fetched[stay] = self.transfer(stay, COPY_BACK, (host, device), "fetched")
        for stay in _due(stays, lambda stay: stay.back_before == position, lambda stay: stay.fetch_from):
            value, fetched = self.old[stay.value], self.fetched[stay]
            self.latest[value] = self.transfer(stay, AWAIT_BACK, (fetched, fetched.args[0]), "back")
            self.forget_followers(value)

    def transfer(self, stay: HostStay, target: Any, args: tuple[Any, ...], what: str) -> fx.Node:
        node = self.add(self.old[stay.value], target, args, {}, f"{stay.value}_{what}")
        node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
        return node

    def evaluate(self, node: fx.Node) -> None:
        again = node in self.latest
        if again and not node.users:
            return  # no node reads it: it only advances the generator, which must happen once
        self.forget_followers(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.newest)
        name = f"{node.name}_again" if again else node.name
        if self.times[node.name] > 1 and is_random(node) and node.users:
            draw = self.repeat_random if again else self.save_random
            self.latest[node] = draw(node, name, args, kwargs)
        else:
            self.latest[node] = self.add(node, node.target, args, kwargs, name)
        self.take_out_elements(node)

    def take_out_elements(self, node: fx.Node) -> None:
        """Inserts getitems right after the call `node` for all elements of the tuple that the call returns, and of
        lists in the tuple. Otherwise the tuple would keep all of them alive."""
        for user in node.users:
            if self.holds(user) and user.name not in self.planned:
                self.newest(user)
                self.take_out_elements(user)

    def newest(self, node: fx.Node) -> fx.Node:
        """Returns the newest node of the new graph that computes a node of the old one."""
        if node not in self.latest:
            assert node.name not in self.planned, f"the schedule reads {node.name} before it evaluates it"
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.newest)
            name = f"{node.name}_again" if node in self.derived else node.name
            self.latest[node] = self.add(node, node.target, args, kwargs, name, op=node.op)
            self.derived.add(node)
        return self.latest[node]

    def forget_followers(self, source: fx.Node | None = None) -> None:
        """Drops from `latest` all views and tuple elements that are made from `source` (None: from any node). The next
        call that reads one of them makes it again, from the latest evaluation of `source`."""
        if source is None:
            self.latest = {node: made for node, made in self.latest.items() if self.holds(node)}
            return
        pending = [user for user in source.users if user.name not in self.planned]
        while pending:
            follower = pending.pop()
            if self.latest.pop(follower, None) is not None:
                pending += [user for user in follower.users if user.name not in self.planned]

    def holds(self, node: fx.Node) -> bool:
        """Returns whether a node holds memory itself: an input, a scheduled call, or an element of its results."""
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
        self, like: fx.Node, target: fx.node.Target, args: tuple[Argument, ...], kwargs: Kwargs, name: str,
        op: str = "call_function",
    ) -> fx.Node:  # fmt: skip
        node = self.new.create_node(op, target, args, kwargs, name=name)
        node.meta = {**like.meta, "partitioner_tag": self.tag}
        return node

    def drop_unread_elements(self) -> None:
        for node in reversed(self.new.nodes):
            if node.target is operator.getitem and not node.users:
                self.new.erase_node(node)


def _due(
    stays: Iterable[HostStay], now: Callable[[HostStay], bool], first: Callable[[HostStay], int]
) -> list[HostStay]:
    """Returns the offloads for which `now` is true, sorted by `first`: transfers that are queued at one position go by
    their deadlines, as in the solver."""
    return sorted(filter(now, stays), key=first)


def _fake_generator_state(drawn: fx.Node) -> torch.Tensor:
    """Returns a fake tensor like the state of the generator that made `drawn`, which is on the CPU for any device."""
    value = drawn.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    state = torch.get_rng_state() if first.device.type == "cpu" else torch.empty(16, dtype=torch.uint8)
    with first.fake_mode:
        return torch.empty(state.shape, dtype=torch.uint8)
