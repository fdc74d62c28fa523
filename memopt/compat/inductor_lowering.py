"""What inductor must know before it lowers a graph, so that one graph always gets the same code, with eager mode's
numbers: its fallbacks (the operators that it calls instead of generating code for them), and the order of random
kernels.

Inductor registers a fallback (`make_fallback`) only at the operator's first call. A value with several readers is
written to memory at once if one of them needs its inputs in memory: in the first graph of a process with such an
operator, the values before its call would be lowered without knowing this, into code that holds another number of
bytes.

From torch 2.13 on, inductor keeps the order of random kernels itself where `fallback_random` is set, but not after an
operator whose results nobody reads, nor for one that saves the generator's state for the backward."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from passes.compat import Replacement, private
from passes.ops.offload_ops import COPY_OUT, TRANSFERS

PRIVATE_NAMES = private("""
    torch._inductor.lowering: lowerings decompositions require_contiguous tag_to_layout_constraint FALLBACK_ALLOW_LIST
        make_fallback(op, layout_constraint=, warn=, override_decomp=) fallback_handler(kernel, add_to_fallback_set)
    torch._inductor.config: implicit_fallbacks _pre_fusion_custom_pass
    torch._inductor.ir: ExternKernel.require_exact_strides(value, strides, allow_padding=)
        FlexibleLayout.stride_ordered_for_memory_format
    torch._inductor.virtualized: V
    torch._inductor.graph: GraphLowering.nodes_prefer_channels_last? .operations?
    torch._library.utils: get_layout_constraint_tag(op, with_default=) is_builtin
    torch._inductor.custom_graph_pass: CustomSchedulerPass? [since 2.13]
    torch._inductor.custom_graph_pass: CustomGraphPass
    torch._inductor.dependencies: WeakDep(name, mutating, is_fake=)
    torch._inductor.scheduler: NodeUser(node, is_weak=) Scheduler.topological_sort_schedule .compute_ancestors
        BaseSchedulerNode.add_fake_dep
""")

FALLBACKS = "copies to the host laid out as results, pools in ceil_mode as they are"
"""The layout rules of this module, a part of the key of inductor's cache of compiled code."""


@torch.library.custom_op("memopt::hold", mutates_args=())
def _hold(value: torch.Tensor) -> torch.Tensor:
    """The value, which inductor writes to memory here rather than computing it in each kernel that reads it."""
    return value.clone()


@_hold.register_fake
def _(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


hold = torch.ops.memopt.hold.default


def _inductor(part: str) -> Any:
    """A module of inductor, which is slow to import."""
    return import_module(f"torch._inductor.{part}")


def _realized(value: Any) -> Any:
    value.realize()
    return value


def make_fallbacks_known(module: fx.GraphModule, *, is_backward: bool) -> None:
    """Register with inductor the lowering of `memopt::hold`, which writes a value to memory, and the fallback of each
    other operator without a lowering in the graph and its subgraphs, as inductor itself would at the operator's first
    call. If the user has turned `implicit_fallbacks` off, most operators get none, and inductor raises an error."""
    lowering = _inductor("lowering")
    lowering.lowerings[hold] = _realized
    for op in dict.fromkeys(_operators(module)):
        if op in lowering.lowerings or op in lowering.decompositions:
            continue
        if f"{op.namespace}::{op.overloadpacket.__name__}" in lowering.FALLBACK_ALLOW_LIST:
            lowering.make_fallback(op, warn=False, override_decomp=True)
        elif _inductor("config").implicit_fallbacks:
            lowering.make_fallback(op, layout_constraint=_layout_constraint(op, is_backward=is_backward))


def pools_as_they_are() -> list[Replacement]:
    """Replacements by which inductor calls ATen's backward of average pooling where the last windows may reach beyond
    the padding (`ceil_mode`). The code that inductor would generate divides by the size of the whole window there, but
    the forward by that of the part within the padding: the gradients would be wrong (torch 2.11 to 2.13)."""
    lowering = _inductor("lowering")
    known = lowering.lowerings
    return [(known, op, _pool(known[op], lowering.fallback_handler(op, False))) for op in _POOLS]


_POOLS = torch.ops.aten.avg_pool2d_backward.default, torch.ops.aten.avg_pool3d_backward.default


def _pool(own: Any, as_it_is: Any) -> Any:
    def lower(
        grad_output: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool,
        divisor_override: Any = None,
    ) -> Any:  # fmt: skip
        call = as_it_is if ceil_mode and count_include_pad and not divisor_override else own
        return call(grad_output, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)

    return lower


def _operators(module: fx.GraphModule) -> Iterator[OpOverload]:
    """The operators that a graph and those within it call, and those that they pass on as an argument."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if node.op == "call_function":
                yield from (word for word in (node.target, *node.args) if isinstance(word, OpOverload))


def _layout_constraint(op: OpOverload, *, is_backward: bool) -> Any:
    """The rule by which inductor lays out the inputs of an operator without a lowering: contiguous for one of torch in
    a backward, unless its tags say otherwise; `_as_returned` for copies to the host, none for those back."""
    from torch._library.utils import get_layout_constraint_tag, is_builtin

    if op in TRANSFERS:
        return _as_returned if op is COPY_OUT else None
    if get_layout_constraint_tag(op, with_default=False) is None and is_builtin(op) and is_backward:
        return _inductor("lowering").require_contiguous
    return _inductor("lowering").tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))


def _as_returned(node: fx.Node, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `memopt::copy_out`: the value in the layout that inductor gives to results of the
    graph, as the copy on the host is one; inductor would else copy it to a second host tensor with other strides."""
    from torch._inductor.virtualized import V

    ir = _inductor("ir")
    strides = node.meta["val"].stride()
    if len(value.get_size()) == 4 and node in V.graph.nodes_prefer_channels_last:
        strides = ir.FlexibleLayout.stride_ordered_for_memory_format(value.get_size(), torch.channels_last)
    return (ir.ExternKernel.require_exact_strides(value, strides, allow_padding=True),), {}


def order_of_random_kernels() -> Any:
    """The scheduler pass for inductor's setting `_pre_fusion_custom_pass`: the pass that the user has set there, if
    any, then `keep_random_order`."""
    users = _inductor("config")._pre_fusion_custom_pass
    if users is not None:
        return lambda nodes: keep_random_order(users(nodes))
    passes = _inductor("custom_graph_pass")
    base: Any = getattr(passes, "CustomSchedulerPass", passes.CustomGraphPass)

    class _RandomOrder(base):  # type: ignore[misc]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return keep_random_order(nodes)

        def uuid(self) -> str:  # for the keys of inductor's caches
            return "memopt: random kernels in the order of the graph"

    return _RandomOrder()


def keep_random_order(nodes: list[Any]) -> list[Any]:
    """Make each random kernel depend on the one before it in the graph, but for those that only redraw from a saved
    state. Returns the scheduler's nodes in an order in which every node comes after those that it depends on."""
    from torch._inductor.virtualized import V

    places = {id(operation): place for place, operation in enumerate(V.graph.operations)}
    random = sorted((node for node in nodes if _draws(node.node)), key=lambda node: places[id(node.node)])
    if len(random) < 2:
        return nodes
    for before, after in pairwise(random):
        buffer = before.get_outputs()[0]
        after.add_fake_dep(_inductor("dependencies").WeakDep(buffer.get_name(), after.get_name(), is_fake=True))
        buffer.users.append(_inductor("scheduler").NodeUser(after, is_weak=True))
    scheduler: Any = random[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()
    return scheduler.nodes


def _draws(kernel: Any) -> bool:
    """Whether a node of inductor's graph draws from the random generator."""
    operator = getattr(kernel, "op_overload", None)
    if operator is torch.ops.higher_order.run_and_save_rng_state:
        return True
    return isinstance(operator, OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags
