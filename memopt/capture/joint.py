"""A captured region: the joint graph of a part of the model, canonical, with what is known of its inputs."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from memopt.capture.operators import DecideJoint, Operators
from memopt.device.fusion import can_inline, fused_away
from passes import CANONICAL, FoundReuse, FreeFirst, find_reuses, format_graph
from passes.graphs.node_facts import backward_nodes, is_tangent


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a region as one ATen graph (`primals_*`, `tangents_*` → outputs, then gradients)."""

    module: fx.GraphModule = field(repr=False)
    forward_outputs: int
    parameter_inputs: frozenset[int] = frozenset()
    """Which of the `primals_*`, counted from 0, are parameters whose gradient this region alone makes, no hook sees."""
    operators: Operators | None = field(default=None, repr=False, compare=False)
    """The operator graph that this one was traced from, before and after each pass; None where none was made."""
    fused: bool = False
    """Whether it is lowered by a backend that fuses elementwise operators with those that read them."""
    reuses: tuple[FoundReuse, ...] = ()
    """The calls of the backward whose results are written over operands that the backward makes. It runs each once, in
    this order, so that such an operand dies there whatever the schedule."""

    trace: Any = field(default=None, repr=False, compare=False)
    """The `RegionTrace` that makes its halves callable; None for a graph that only is planned for."""
    differentiated: bool = True
    """Whether there is a backward: without one, `module` is the region's forward and nothing is planned."""

    def accumulating(self, parameter_inputs: frozenset[int]) -> JointGraph:
        """The same graph with other parameters whose gradients it may add in place."""
        return self if parameter_inputs == self.parameter_inputs else replace(self, parameter_inputs=parameter_inputs)

    @classmethod
    def of(
        cls,
        traced: fx.GraphModule,
        forward_outputs: int,
        parameter_inputs: frozenset[int],
        operators: Operators | None = None,
        decide: DecideJoint | None = None,
        *,
        fused: bool = False,
        reinplace: bool = False,
        trace: Any = None,
    ) -> JointGraph:
        """The canonical form of a graph as AOTAutograd hands it to a partitioner, and after the passes of `decide`.

        `reinplace`: operands that die in the backward are to be written over, unless what it is lowered by sees to it.
        """
        module = CANONICAL(traced)
        if decide is not None:
            module = CANONICAL(decide(module, forward_outputs)(module))
        reuses: tuple[FoundReuse, ...] = ()
        if reinplace and not fused:
            module = FreeFirst()(module)
            reuses = find_reuses(module, backward_nodes(module.graph))
        return cls(module, forward_outputs, parameter_inputs, operators, fused, reuses, trace)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the graph's text: equal for captures of the same region with the same shapes and types."""
        return hashlib.sha256(format_graph(self.module.graph).encode()).hexdigest()[:16]

    @cached_property
    def fused_away(self) -> frozenset[fx.Node]:
        """The nodes whose values are never held, since each kernel that reads them computes them."""
        return fused_away(self.module.graph) if self.fused else frozenset()

    @property
    def held_nodes(self) -> list[fx.Node]:
        """All others."""
        return [node for node in self.module.graph.nodes if node not in self.fused_away]

    @cached_property
    def generated(self) -> frozenset[fx.Node]:
        """The nodes that run in kernels which are generated for them, not in those of ATen."""
        return frozenset(node for node in self.held_nodes if can_inline(node)) if self.fused else frozenset()

    @cached_property
    def parameter_gradients(self) -> dict[int, int]:
        """Result position → number of the `primals_*` input whose gradient it is, for gradients of parameters that can
        be given away at once: nothing else in the graph reads them, and no two results are one."""
        results = self.module.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        times = Counter(result for result in results if isinstance(result, fx.Node))
        return {
            self.forward_outputs + number: number
            for number, result in enumerate(results[self.forward_outputs :])
            if number in self.parameter_inputs
            and isinstance(result, fx.Node)
            and result.op != "placeholder"
            and len(result.users) == times[result] == 1
        }

    @cached_property
    def ends_before_loss(self) -> bool:
        """Whether a gradient that is not a scalar comes in: the loss is computed from what the region returns."""
        return any(is_tangent(node) and node.meta["val"].dim() > 0 for node in self.module.graph.nodes)

    @cached_property
    def has_batch_statistics(self) -> bool:
        """Whether it normalises by means over the samples of its batch."""
        calls = (node for node in self.module.graph.nodes if node.op == "call_function")
        return any(_normalises_batch(str(node.target), node.args) for node in calls)

    @cached_property
    def tensor_positions(self) -> dict[int, int]:
        """Number of an input → its position among the inputs that are tensors: autograd counts no others."""
        primals = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        tensors = [number for number, node in enumerate(primals) if isinstance(node.meta["val"], torch.Tensor)]
        return {number: position for position, number in enumerate(tensors)}


def _normalises_batch(name: str, args: tuple[Any, ...]) -> bool:
    forward = "batch_norm" in name and "backward" not in name and "no_training" not in name
    # (input, weight, bias, running_mean, running_var, training, …); without running statistics (input, …, training, …)
    return forward and True in args
