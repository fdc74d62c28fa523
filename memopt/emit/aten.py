"""Halves run operator by operator, as they stand: bitwise the plain model's numbers, and the memory of the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.capture.joint import JointGraph
from memopt.compat.aot import boxed
from memopt.emit.emitted import Cut, Emitted


def compile_as_aten(joint: JointGraph, cut: Cut) -> Emitted:
    """The region with its halves as plain ATen operators. To be called in the context of its trace."""
    return Emitted(joint.trace.aot.compile(lambda *_, **__: cut(), _as_it_stands))


def _as_it_stands(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
    return boxed(module)
