"""Halves compiled by inductor, torch.compile's own backend, with what they then hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from memopt.lowering.footprint import Footprint, Half, footprint
from memopt.lowering.keep_order import keep_products_early
from memopt.lowering.lowering import Lowered, Lowering, PartitionTraced
from memopt.torch_compat import compile_by_inductor, without_autocast
from passes import copy_graph_module, format_graph


@dataclass(frozen=True)
class InductorLowering:
    """Fused kernels: what lies between fused operators is never held, and kernels come in an order of inductor's."""

    fuses: bool = True

    def compile(self, graph_module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionTraced) -> Lowered:
        halves = _Halves(partition)
        # Inductor takes over what it compiles, and a region may be lowered again by another plan.
        module = copy_graph_module(graph_module)
        run = compile_by_inductor(module, list(inputs), halves.partition, halves.made, halves.plan_hash)
        return Lowered(run, halves.footprint() if halves.backward else None)


@dataclass
class _Halves:
    """What one compilation comes to: the halves as cut and as compiled."""

    cut: PartitionTraced
    forward: Half | None = None
    backward: Half | None = None
    hash: str = ""
    outputs: int = field(default=0)

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        self.outputs = options["num_fwd_outputs"]
        halves = self.cut(joint, joint_inputs, **options)
        for half in halves:
            keep_products_early(half)
        self.hash = hashlib.sha256("".join(format_graph(half.graph) for half in halves).encode()).hexdigest()
        return halves

    def plan_hash(self) -> str:
        """Names the plan by which the region was cut; a region without gradients has none."""
        return self.hash or "no plan"

    def made(self, compiled: Any, graph: fx.GraphModule, is_backward: bool) -> Callable[..., Any]:
        half = Half(compiled.source_code, graph)
        if is_backward:
            self.backward = half
        else:
            self.forward = half

        def run(arguments: list[Any]) -> Any:
            with without_autocast():
                return compiled(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def footprint(self) -> Footprint:
        assert self.forward is not None
        assert self.backward is not None
        return footprint(self.forward, self.backward, self.outputs)


INDUCTOR: Lowering = InductorLowering()
