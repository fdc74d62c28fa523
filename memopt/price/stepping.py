"""Where a parameter may be stepped within the backward: once its gradient is whole and nothing reads it any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from memopt.device.storages import Storages, storage_bytes
from passes.graphs.node_facts import is_tangent


@dataclass(frozen=True)
class Steps:
    """The parameters of a region that are stepped in its backward; by default none."""

    inside: Mapping[int, int] = field(default_factory=dict)
    """Result position → number of the input, for those that may be stepped before the backward ends."""
    workspaces: Mapping[int, int] = field(default_factory=dict)
    """Number of the input → bytes that stepping it takes beside itself, its gradient and its state."""


class MemoryUses:
    """Who reads which memory in a joint graph, scheduled or not."""

    def __init__(self, graph: fx.Graph, storages: Storages) -> None:
        self.storages = storages
        self.readers: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for index in storages.read_by(node):
                self.readers.setdefault(index, []).append(node)
        output = graph.output_node()
        results = output.args[0]
        assert isinstance(results, (tuple, list))
        self.output = output
        self.results: list[Any] = list(results)
        self.inputs = [node for node in graph.nodes if node.op == "placeholder" and not is_tangent(node)]
        nodes = (each for each in results if isinstance(each, fx.Node))
        self.returned = Counter(index for node in nodes for index in storages.of.get(node, ()))

    def before_step(self, position: int, number: int) -> list[fx.Node] | None:
        """The nodes that must have run before input `number` can be stepped by result `position`, in their order: those
        that read either's memory, under whatever name, and what makes the gradient.

        None where it has to wait for the end: the parameter's memory is returned, or the gradient's is another result's
        too, or was there before.
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
class PlacedStep:
    """A parameter's step where it may come first."""

    position: int
    """Of the gradient among the results."""
    number: int
    """Of the parameter among the inputs."""
    storage: int
    """The gradient's."""
    before: tuple[fx.Node, ...]
    """The nodes that must have run."""
    workspace_bytes: int


def place_steps(
    graph: fx.Graph, storages: Storages, steps: Steps, backward: Sequence[fx.Node]
) -> dict[fx.Node, list[PlacedStep]]:
    """The steps behind each node of `backward`, which comes in the order of its evaluation."""
    if not steps.inside:
        return {}
    uses = MemoryUses(graph, storages)
    order = {node: number for number, node in enumerate(backward)}
    found: dict[fx.Node, list[PlacedStep]] = {}
    for position, number in sorted(steps.inside.items()):
        before = uses.before_step(position, number) or []
        last = max((node for node in before if node in order), key=order.__getitem__, default=None)
        if last is not None:
            given, gradient = uses.inputs[number].meta["val"], uses.results[position].meta["val"]
            # A gradient that lies in memory in another order is copied.
            copy = storage_bytes(given) if gradient.stride() != given.stride() else 0
            (made,) = storages.of[uses.results[position]]
            step = PlacedStep(position, number, made, tuple(before), steps.workspaces[number] + copy)
            found.setdefault(last, []).append(step)
    return found
