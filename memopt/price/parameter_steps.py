"""Where the optimiser may step a parameter within the backward: once nothing reads it or its gradient any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import fx

from memopt.device.storages import Storages, storage_bytes
from passes.graphs.node_facts import is_tangent


@dataclass(frozen=True)
class ParameterSteps:
    """The parameters of a region that the optimiser steps within its backward; by default none."""

    inside: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Position of the gradient among the results → number of the parameter among the inputs, for parameters that may be
    stepped before the backward ends."""
    workspaces: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Number of the parameter among the inputs → bytes that its step takes beside it, its gradient and its state."""


class MemoryUses:
    """Which nodes of a joint graph read which storages, scheduled or not."""

    def __init__(self, graph: fx.Graph, storages: Storages) -> None:
        self.storages = storages
        self.readers = storages.aliases.readers
        output = graph.output_node()
        results = output.args[0]
        assert isinstance(results, (tuple, list))
        self.output = output
        self.results: list[Any] = list(results)
        self.inputs = [node for node in graph.nodes if node.op == "placeholder" and not is_tangent(node)]
        nodes = (result for result in results if isinstance(result, fx.Node))
        self.returned = Counter(index for node in nodes for index in storages.of.get(node, ()))

    def before_step(self, position: int, number: int) -> list[fx.Node] | None:
        """The nodes that must have run before the parameter at input `number` is stepped by the gradient at result
        `position`, in program order: the one that makes the gradient, and all that read the storage of either.

        None where the step has to wait for the end of the backward: the parameter's storage is returned, or the
        gradient's is also another result's, or was there before the backward.
        """
        gradient = self.results[position]
        assert isinstance(gradient, fx.Node)
        own, made = (self.storages.of.get(node, ()) for node in (self.inputs[number], gradient))
        if len(own) != 1 or len(made) != 1 or self.returned[own[0]] or self.returned[made[0]] != 1:
            return None
        maker = self.storages.infos[made[0]].maker
        if maker.op != "call_function":
            return None
        readers = (node for index in (own[0], made[0]) for node in self.readers.get(index, ()))
        return [maker, *(node for node in readers if node is not self.output)]


@dataclass(frozen=True)
class PlacedParameterStep:
    """A parameter's step, behind the first node after which it may run."""

    position: int
    """The position of the gradient among the results."""
    number: int
    """The number of the parameter among the inputs."""
    storage: int
    """The number of the gradient's storage in `Storages`."""
    before: tuple[fx.Node, ...]
    """The nodes that must have run before it."""
    workspace_bytes: int
    """Bytes that the step takes beside the parameter, its gradient and its state."""


def place_steps(
    graph: fx.Graph, storages: Storages, steps: ParameterSteps, backward: Sequence[fx.Node]
) -> dict[fx.Node, list[PlacedParameterStep]]:
    """For each node of `backward`, which is in program order, the parameter steps that may run right behind it."""
    if not steps.inside:
        return {}
    uses = MemoryUses(graph, storages)
    order = {node: number for number, node in enumerate(backward)}
    found: dict[fx.Node, list[PlacedParameterStep]] = {}
    for position, number in sorted(steps.inside.items()):
        before = uses.before_step(position, number) or []
        last = max((node for node in before if node in order), key=order.__getitem__, default=None)
        if last is not None:
            given, gradient = uses.inputs[number].meta["val"], uses.results[position].meta["val"]
            # A gradient that lies in memory in another order is copied.
            copy = storage_bytes(given) if gradient.stride() != given.stride() else 0
            (made,) = storages.of[uses.results[position]]
            step = PlacedParameterStep(position, number, made, tuple(before), steps.workspaces[number] + copy)
            found.setdefault(last, []).append(step)
    return found
