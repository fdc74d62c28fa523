"""Halves compiled by inductor, torch.compile's own backend, with what they then hold."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from memopt.compat import InductorFailed, compile_by_inductor, without_autocast
from memopt.emit.casts import spell_casts
from memopt.emit.footprint import Half, footprint
from memopt.emit.inductor_gradients import Handing
from memopt.emit.keep_order import keep_products_early
from memopt.emit.lowering import Lowered, Lowering, PartitionTraced
from memopt.errors import CaptureError
from memopt.planning.footprint import Footprint
from passes import copy_graph_module, format_graph


@dataclass(frozen=True)
class InductorLowering:
    """Fused kernels: what lies between fused operators is never held, and kernels come in an order of inductor's."""

    fuses: bool = True

    def compile(self, graph_module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionTraced) -> Lowered:
        halves = _Halves(partition)
        # Inductor takes over what it compiles, and a region may be lowered again by another plan.
        module = copy_graph_module(graph_module)
        try:
            run = compile_by_inductor(module, list(inputs), halves.partition, halves.made, halves.plan_hash)
        except InductorFailed as failure:
            reason = " ".join(str(failure).split())[:300]
            raise CaptureError(f"inductor does not compile it: {reason}; give optimize backend='aten'") from failure
        return Lowered(run, halves.footprint())


@dataclass
class _Halves:
    """What one compilation comes to: the halves as cut and as compiled."""

    cut: PartitionTraced
    forward: Half | None = None
    backward: Half | None = None
    handing: Handing | None = None
    hash: str = ""
    outputs: int = 0

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        forward, backward = self.cut(joint, joint_inputs, **options)
        self.outputs = options["num_fwd_outputs"]
        self.handing = Handing(backward)
        for half in (forward, backward):
            spell_casts(half)
            keep_products_early(half)
        texts = format_graph(forward.graph), format_graph(backward.graph)
        self.hash = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return forward, backward

    def plan_hash(self) -> str:
        """Names the plan by which the region was cut; a region without gradients has none."""
        return self.hash or "no plan"

    def made(self, compiled: Any, inputs: list[fx.Node], is_backward: bool) -> Callable[..., Any]:
        half = Half(compiled.source_code, inputs)
        if is_backward:
            self.backward = half
            return _boxed(_taking_gradients(compiled, self.handing))
        self.forward = half
        return _boxed(compiled)

    def footprint(self) -> Footprint | None:
        """None for a region without gradients, and where the dry run meets what it does not know."""
        if self.forward is None or self.backward is None:
            return None
        try:
            return footprint(self.forward, self.backward, self.outputs)
        except Exception as failure:  # the code is of another version of inductor: anything may be in it
            reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            warnings.warn(
                f"memopt cannot tell what inductor's code holds, and goes by its plan ({reason})", stacklevel=2
            )
            return None


def _taking_gradients(compiled: Callable[[list[Any]], Any], handing: Handing | None) -> Callable[[list[Any]], Any]:
    """A compiled backward whose gradients are taken as they come."""
    if handing is None or not handing.modules:
        return compiled

    def run(arguments: list[Any]) -> Any:
        with handing.active() as handed_on:
            computed = compiled(arguments)
            return handing.results(computed, handed_on)

    return run


def _boxed(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run(arguments: list[Any]) -> Any:
        with without_autocast():
            return compiled(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


INDUCTOR: Lowering = InductorLowering()
