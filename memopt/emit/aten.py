"""The "aten" backend: both halves run operator by operator, so results equal the plain model's bit for bit and memory
is as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.capture.joint import JointGraph
from memopt.compat.tracing import boxed
from memopt.emit.emitted import Cut, Emitted
from memopt.emit.failures import telling
from memopt.emit.gradients import Accumulation
from memopt.emit.reached import withholding


def compile_as_aten(joint: JointGraph, cut: Cut, accumulation: Accumulation) -> Emitted:
    """The region with its halves as plain ATen operators; `accumulation` is told of a backward that has no memory left.

    It must be called in the context of the region's trace."""

    def backward(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        return telling(withholding(boxed(module), joint), accumulation)

    return Emitted(joint.trace.aot.compile(lambda *_, **__: cut(), _uncompiled, backward))


def _uncompiled(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """A half as a function of its inputs in one list, run operator by operator."""
    return boxed(module)
