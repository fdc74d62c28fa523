"""The operators that a plan recomputes, offloads, writes in place or frees early, with the reasons."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import fx

from memopt.capture.joint import JointGraph
from memopt.device.storages import storage_bytes
from memopt.planning.change import FREED, IN_PLACE, MOVED, OFFLOADED, RECOMPUTED, Change
from memopt.planning.graph_facts import GraphFacts, operator_name
from memopt.planning.region_schedule import RegionSchedule, scheduled_graph
from memopt.price.price import RETURN_OUTPUTS
from memopt.price.priced_graph import PricedGraph
from passes import diff_graphs
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path
from passes.graphs.op_kinds import is_cast

if TYPE_CHECKING:
    from memopt.planning.captured import Captured
    from memopt.planning.joined import Joined


def schedule_changes(
    captured: Captured, joined: Joined, schedules: Sequence[RegionSchedule], *, order: bool = False
) -> Iterator[Change]:
    """The changes that schedules make to the joint graphs of all regions; with `order`, nodes that only moved too."""
    for number, (region, priced, schedule) in enumerate(zip(captured.regions, joined.prices, schedules, strict=True)):
        yield from _RegionChanges(number, region, priced, schedule).all(order=order)


class _RegionChanges:
    """The changes of one region's schedule."""

    def __init__(self, number: int, region: JointGraph, priced: PricedGraph, schedule: RegionSchedule) -> None:
        self.region, self.schedule, self.problem = region, schedule, priced.problem
        self.facts = GraphFacts(region.module.graph, number)
        self.index = {name: index for index, name in enumerate(priced.nodes) if name}
        self.value = {name: index for index, name in enumerate(priced.values) if name}
        self.returned = {storage for op in self.problem.ops if op.name == RETURN_OUTPUTS for storage in op.reads}
        self.late = backward_nodes(region.module.graph)
        self.forward_of: dict[int, fx.Node] = {}
        for node in region.module.graph.nodes:
            if node not in self.late and node.op == "call_function" and "seq_nr" in node.meta:
                self.forward_of.setdefault(node.meta["seq_nr"], node)

    def all(self, *, order: bool) -> Iterator[Change]:
        yield from self.recomputed()
        yield from self.offloaded()
        yield from self.freed()
        yield from self.in_place()
        if order:
            scheduled = scheduled_graph(self.region, self.schedule)
            for name in diff_graphs(self.region.module, scheduled).moved:
                yield self.facts.change(MOVED, self.facts.nodes[name])

    def recomputed(self) -> Iterator[Change]:
        again: dict[str, list[int]] = defaultdict(list)
        seen: set[str] = set()
        for position, name in enumerate(self.schedule.evaluations):
            if name in seen:
                again[name].append(position)
            seen.add(name)
        for name, positions in again.items():
            op = self.problem.ops[self.index[name]]
            yield self.facts.change(
                RECOMPUTED,
                self.facts.nodes[name],
                nbytes=sum(self.problem.storages[storage].bytes for storage in op.makes),
                seconds=op.seconds * len(positions),
                times=len(positions),
                readers=self._readers(op.makes, [position + 1 for position in positions]),
            )

    def offloaded(self) -> Iterator[Change]:
        backs: dict[str, list[int]] = defaultdict(list)
        for stay in self.schedule.offloads:
            backs[stay.value].append(stay.back_before)
        for name, positions in backs.items():
            storage = self.value[name]
            maker = self.facts.nodes[name]
            while maker.name not in self.index:  # an element of an operator's results
                maker = maker.all_input_nodes[0]
            yield self.facts.change(
                OFFLOADED,
                maker,
                detail="" if maker.name == name else name,
                nbytes=self.problem.storages[storage].bytes,
                times=len(positions),
                readers=self._readers((storage,), positions),
            )

    def freed(self) -> Iterator[Change]:
        """The gradients of parameters that the optimiser steps within the backward."""
        inputs = [node for node in self.facts.nodes.values() if node.op == "placeholder" and not is_tangent(node)]
        for number in self.schedule.steps:
            user = next((user for user in inputs[number].users if module_path(user)), inputs[number])
            nbytes = storage_bytes(inputs[number].meta["val"])
            reason = "its gradient, since the parameter is stepped in the backward"
            yield self.facts.change(FREED, user, detail=inputs[number].name, nbytes=nbytes, reason=reason)

    def in_place(self) -> Iterator[Change]:
        for reuse in self.region.reuses:
            yield self.facts.change(IN_PLACE, self.facts.nodes[reuse.name], detail=self._maker(reuse.operand))

    def _maker(self, name: str) -> str:
        return operator_name(self.facts.nodes[name])

    def _readers(self, storages: Sequence[int], starts: Sequence[int]) -> tuple[str, ...]:
        """The operators in whose backward the storages, as made before each start, are first read: directly, or
        through what is recomputed from them. Where none does, the caller may be handed them."""
        found = (self._first_reader(set(storages), start) for start in starts)
        return tuple(dict.fromkeys(reader for reader in found if reader))

    def _first_reader(self, storages: set[int], start: int) -> str:
        for position in range(start, len(self.schedule.evaluations)):
            name = self.schedule.evaluations[position]
            op = self.problem.ops[self.index[name]]
            if storages.intersection(op.reads):
                node = self.facts.nodes[name]
                if node in self.late and not is_cast(node):
                    return self._differentiated(node)
                storages.update(op.makes)
        return "the call's outputs" if storages & self.returned else ""

    def _differentiated(self, node: fx.Node) -> str:
        """The name of the forward's operator whose backward a node belongs to; its own name where that is unknown."""
        forward = self.forward_of.get(node.meta.get("seq_nr", -1))
        return operator_name(forward if forward and module_path(forward) == module_path(node) else node)
