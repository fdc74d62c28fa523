"""Writes a schedule with offloads into a joint graph: the copies out and back, and where compute waits for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.apply_schedule import ApplySchedule, Rewriter
from passes.graphs.edit import LazyCode, on_stored_values
from passes.graphs.node_facts import tensors
from passes.graphs.verify import VerifyError
from passes.ops.offload_ops import AWAIT_BACK, AWAIT_OUT, COPY_BACK, COPY_OUT


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
class ApplyOffloads(ApplySchedule):
    """Writes a schedule as `ApplySchedule` does, and offloads values to the host as `stays` says.

    `boundary` is the position of the backward's first evaluation. A value with `freed_before == boundary` is freed at
    the end of the forward, one with `fetch_from == boundary` is fetched at the beginning of the backward.

    Before:
        relu = aten.relu(addmm)
        mm_1 = aten.mm(tangents_1, relu)
    After (`evaluations=("relu", "mm_1")`, `boundary=1`, `stays=(HostStay("relu", 0, 1, 1, 1),)`):
        relu = aten.relu(addmm)
        relu_out = memopt.copy_out(relu)
        relu_host = memopt.await_out(relu_out, relu)
        relu_fetched = memopt.copy_back(relu_host, cpu)
        relu_back = memopt.await_back(relu_fetched, relu_host)
        mm_1 = aten.mm(tangents_1, relu_back)
    """

    stays: tuple[HostStay, ...] = ()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {len(self.stays)} offloads)"

    def requires(self, graph_module: fx.GraphModule) -> None:
        super().requires(graph_module)
        nodes = {node.name: node for node in graph_module.graph.nodes}
        mend = "make the schedule from the graph that the pass gets"
        for stay in self.stays:
            if stay.value not in nodes:
                raise VerifyError(stay.value, "an offload names this node, which the graph does not have", mend)
            first = -1 if nodes[stay.value].op == "placeholder" else 0
            if not first <= stay.out_after < stay.freed_before <= stay.fetch_from <= stay.back_before:
                problem = (
                    f"{stay} must be copied to the host, freed and fetched in this order: out_after < freed_before <= "
                    "fetch_from <= back_before"
                )
                raise VerifyError(stay.value, problem, mend)

    def rewrite(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        with on_stored_values(graph_module.graph):
            return LazyCode(graph_module, _OffloadRewriter(self, graph_module.graph).run())


class _OffloadRewriter(Rewriter):
    """The walk over a schedule that also adds the transfers of every offload."""

    def __init__(self, schedule: ApplyOffloads, graph: fx.Graph) -> None:
        super().__init__(schedule, graph)
        self.stays = schedule.stays
        self.went: dict[HostStay, fx.Node] = {}
        """Per offload: the node that was copied out. `host` has its copy on the host, `fetched` the copy back."""
        self.host: dict[HostStay, fx.Node] = {}
        self.fetched: dict[HostStay, fx.Node] = {}

    def before(self, position: int) -> None:
        if position != self.schedule.boundary:
            self.free(position)
        for stay in self.due(lambda stay: stay.fetch_from == position, lambda stay: stay.back_before):
            device = next(tensors(self.old[stay.value].meta["val"])).device
            host = self.inputs[self.old[stay.value]] if self.is_given(stay) else self.host[stay]
            self.fetched[stay] = self.transfer(stay, COPY_BACK, (host, device), "fetched")
        for stay in self.due(lambda stay: stay.back_before == position, lambda stay: stay.fetch_from):
            value, fetched = self.old[stay.value], self.fetched[stay]
            self.latest[value] = self.transfer(stay, AWAIT_BACK, (fetched, fetched.args[0]), "back")
            self.forget_followers(value)

    def after(self, position: int) -> None:
        for stay in self.sent(lambda stay: stay.out_after == position, lambda stay: stay.freed_before):
            self.went[stay] = self.newest(self.old[stay.value])
            self.host[stay] = self.transfer(stay, COPY_OUT, (self.went[stay],), "out")

    def end_forward(self) -> None:
        self.free(self.schedule.boundary)

    def free(self, position: int) -> None:
        for stay in self.sent(lambda stay: stay.freed_before == position, lambda stay: stay.out_after):
            self.host[stay] = self.transfer(stay, AWAIT_OUT, (self.host[stay], self.went[stay]), "host")

    def due(self, now: Callable[[HostStay], bool], first: Callable[[HostStay], int]) -> list[HostStay]:
        """Returns the offloads for which `now` is true, sorted by `first`.

        Transfers that are queued at one position go by their deadlines, as in the solver.
        """
        return sorted(filter(now, self.stays), key=first)

    def sent(self, now: Callable[[HostStay], bool], first: Callable[[HostStay], int]) -> list[HostStay]:
        """Returns those of `due` that are copied out."""
        return [stay for stay in self.due(now, first) if not self.is_given(stay)]

    def is_given(self, stay: HostStay) -> bool:
        """Returns whether the value of an offload is an input, which lies on the host."""
        return self.old[stay.value].op == "placeholder"

    def transfer(self, stay: HostStay, target: Any, args: tuple[Any, ...], what: str) -> fx.Node:
        node = self.add(self.old[stay.value], target, args, {}, f"{stay.value}_{what}")
        node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
        return node
