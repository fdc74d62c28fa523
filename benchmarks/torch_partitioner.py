"""What `torch.compile` with `activation_memory_budget` would save: torch's own partitioner, on the same joint graph."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from functorch.compile import config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx

from memopt.capture.joint import JointGraph
from memopt.device.storages import find_storages
from memopt.price.priced_graph import PricedGraph

SOLVERS = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg")


class TorchPartitioner:
    """Asks torch's partitioner what it saves of one joint graph at several budgets; the graph is not changed."""

    def __init__(self, joint: JointGraph, priced: PricedGraph) -> None:
        self._joint = joint
        self._cuts: dict[Any, tuple[list[str], list[str]]] = {}
        problem = priced.problem
        number = {storage.name: index for index, storage in enumerate(problem.storages)}
        storages = find_storages(joint.module.graph)
        names = [block.maker.name for block in storages.blocks]
        self._storages = {
            node.name: {number[names[index]] for index in indices if names[index] in number}
            for node, indices in storages.of.items()
        }

    def saved(self, budget: float, solver: str) -> frozenset[int]:
        """The storages that the backward gets, with `activation_memory_budget = budget` (0 to 1) and a knapsack
        `solver` of torch's. Views name the storage that they look into."""
        module = copy.deepcopy(self._joint.module)
        settings = {"activation_memory_budget": budget, "activation_memory_budget_solver": solver}
        with functorch_config.patch(**settings), self._remembered_cuts():
            _, backward = min_cut_rematerialization_partition(module, None, num_fwd_outputs=self._joint.forward_outputs)
        given = [node.name for node in backward.graph.nodes if node.op == "placeholder"]
        return frozenset(storage for name in given for storage in self._storages.get(name, ()))

    @contextmanager
    def _remembered_cuts(self) -> Iterator[None]:
        """Cache minimum cuts, which take seconds to minutes, since every budget asks for the same few."""
        partitioners = sys.modules[min_cut_rematerialization_partition.__module__]
        own = partitioners.solve_min_cut  # type: ignore[attr-defined]
        partitioners.solve_min_cut = self._remembering(own)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            partitioners.solve_min_cut = own  # type: ignore[attr-defined]

    def _remembering(self, solve: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(solve)
        def remembering(graph: fx.Graph, node_info: Any, options: Any, dont_ban: Any = None) -> Any:
            key = (repr(options), frozenset(node.name for node in dont_ban or ()))
            if key not in self._cuts:
                saved, banned = solve(graph, node_info, options, dont_ban)
                self._cuts[key] = [node.name for node in saved], [node.name for node in banned]
            by_name = {node.name: node for node in graph.nodes}
            saved_names, banned_names = self._cuts[key]
            return [by_name[name] for name in saved_names], dict.fromkeys(by_name[name] for name in banned_names)

        return remembering
