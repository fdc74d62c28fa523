"""Operators that inductor calls as they are, made known to it before it lowers a graph that has them.

Inductor makes an operator known (`make_fallback`) when it comes to the first call of it. A value with several users is
written to memory at once if one of them is known to need its inputs in memory. In the first graph of a process that has
such an operator, what comes before the call was therefore lowered without it, and other code was written for the same
graph later on, which holds other bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from passes.compat import private
from passes.ops.offload_ops import COPY_OUT, TRANSFERS

PRIVATE_NAMES = (
    *private(
        "torch._inductor.lowering",
        "lowerings",
        "decompositions",
        "require_contiguous",
        "tag_to_layout_constraint",
        "FALLBACK_ALLOW_LIST",
    ),
    *private("torch._inductor.lowering", "make_fallback", call="op, layout_constraint=, warn=, override_decomp="),
    *private("torch._inductor.config", "implicit_fallbacks"),
    *private("torch._inductor.ir", "ExternKernel.require_exact_strides", call="value, strides, allow_padding="),
    *private("torch._inductor.ir", "FlexibleLayout.stride_ordered_for_memory_format"),
    *private("torch._inductor.virtualized", "V"),
    *private("torch._inductor.graph", "GraphLowering.nodes_prefer_channels_last", needed=False),
    *private("torch._library.utils", "get_layout_constraint_tag", call="op, with_default="),
    *private("torch._library.utils", "is_builtin"),
)

__all__ = ["FALLBACKS", "make_fallbacks_known"]

FALLBACKS = "copies to the host laid out as results"
"""Describes the layout rules of this module. It is part of the key of inductor's cache, so that code compiled under
other rules is not reused."""


def make_fallbacks_known(module: fx.GraphModule, *, is_backward: bool) -> None:
    """Give each operator of the graph, and of graphs within it, the fallback that inductor would give it at its call,
    if it has no lowering. Nothing is done where the user has turned such fallbacks off: inductor then raises."""
    from torch._inductor import config
    from torch._inductor import lowering as untyped

    lowering: Any = untyped
    for op in dict.fromkeys(_operators(module)):
        if op in lowering.lowerings or op in lowering.decompositions:
            continue
        if f"{op.namespace}::{op.overloadpacket.__name__}" in lowering.FALLBACK_ALLOW_LIST:
            lowering.make_fallback(op, warn=False, override_decomp=True)
        elif config.implicit_fallbacks:
            lowering.make_fallback(op, layout_constraint=_layout_constraint(op, is_backward=is_backward))


def _operators(module: fx.GraphModule) -> Iterator[OpOverload]:
    """The operators that are called, and those that are given to other operators as an argument."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.op == "call_function":
                yield from (word for word in (node.target, *node.args) if isinstance(word, OpOverload))


def _layout_constraint(op: OpOverload, *, is_backward: bool) -> Any:
    """The layout that inductor gives to the inputs of an operator without a lowering: contiguous ones for an operator
    of torch in a backward, where its tags do not say otherwise. Host copies keep their strides."""
    from torch._inductor.lowering import require_contiguous, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag, is_builtin

    if op in TRANSFERS:
        return _as_returned if op is COPY_OUT else None
    if get_layout_constraint_tag(op, with_default=False) is None and is_builtin(op) and is_backward:
        return require_contiguous
    return tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))


def _as_returned(node: fx.Node, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `memopt::copy_out`: the value laid out as inductor lays out a result of the graph, since the
    copy on the host is one. Otherwise inductor would copy it to a second host tensor with other strides, whose memory
    the offloading operators do not know."""
    from torch._inductor import ir as untyped
    from torch._inductor.virtualized import V

    ir: Any = untyped
    strides = node.meta["val"].stride()
    if len(value.get_size()) == 4 and node in V.graph.nodes_prefer_channels_last:
        strides = ir.FlexibleLayout.stride_ordered_for_memory_format(value.get_size(), torch.channels_last)
    return (ir.ExternKernel.require_exact_strides(value, strides, allow_padding=True),), {}
