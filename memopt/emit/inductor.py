"""Halves compiled by inductor, torch.compile's own backend, with what they then hold."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from memopt.capture.inductor_trace import not_compiled
from memopt.capture.joint import JointGraph
from memopt.compat.aot import mark_boxed
from memopt.compat.dispatch import without_autocast
from memopt.compat.inductor import InductorFailed, compile_by_inductor
from memopt.emit.casts import spell_casts
from memopt.emit.emitted import Cut, Emitted
from memopt.emit.footprint import Half, footprint
from memopt.emit.inductor_gradients import Handing
from memopt.emit.keep_order import keep_products_early
from memopt.planning.footprint import Footprint
from passes import copy_graph_module, format_graph


def compile_by_backend(joint: JointGraph, cut: Cut) -> Emitted:
    """The region with its halves as kernels of inductor's, which fuse elementwise operators: what lies between fused
    operators is never held, and kernels come in an order of inductor's.

    To be called in the context of its trace. Raises `CaptureError` where inductor gives up.
    """
    halves = _Halves(cut, joint.forward_outputs)
    module, inputs = joint.trace.module, joint.trace.region.inputs
    try:
        # Inductor takes over what it compiles, and a region may be compiled again by another plan.
        run = compile_by_inductor(copy_graph_module(module), inputs, halves.partition, halves.made, halves.plan_hash)
    except InductorFailed as failure:
        raise not_compiled(failure) from failure
    return Emitted(run, halves.footprint())


@dataclass
class _Halves:
    """What one compilation comes to: the halves as cut and as compiled."""

    cut: Cut
    outputs: int
    """How many results of the forward are its caller's."""
    forward: Half | None = None
    backward: Half | None = None
    handing: Handing | None = None
    hash: str = ""

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        """The halves as planned: the joint graph is the one that was planned for, traced once more."""
        assert num_fwd_outputs == self.outputs, "inductor traced another graph than was planned for"
        forward, backward = self.cut()
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

    return mark_boxed(run)
