"""The "inductor" backend: forward and backward compiled by torch.compile's own backend, and the bytes that the compiled
code holds."""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from memopt.capture.joint import JointGraph, not_compiled
from memopt.compat.inductor import (
    NO_CUDA_GRAPHS,
    InductorFailed,
    autotuning_within,
    compile_by_inductor,
    cuda_graphs_wanted,
)
from memopt.compat.inductor_lowering import hold
from memopt.compat.operators import without_autocast
from memopt.compat.symbols import sizes_up_to
from memopt.compat.tracing import mark_boxed
from memopt.device.storages import behind_views, can_inline, is_elementwise, is_view, readers_of, storage_bytes
from memopt.emit.footprint import Half, footprint
from memopt.emit.gradients import AccumulateGradient, Accumulation, telling, withholding
from memopt.planning.refit import Footprint
from passes import copy_graph_module, format_graph
from passes.graphs.node_facts import graph_results


def compile_by_backend(
    joint: JointGraph,
    cut: Callable[[], tuple[fx.GraphModule, fx.GraphModule]],
    accumulation: Accumulation,
    allowed_sizes: Mapping[str, int],
    limit_bytes: int | None,
) -> tuple[Callable[..., Any], Footprint | None]:
    """The region as a function: `cut` returns its forward and backward graphs, which inductor compiles. It fuses
    elementwise operators, so that values between fused operators are never materialised, and it chooses the order of
    the kernels. Also the bytes that the compiled forward and backward hold; None where they are not known.

    `allowed_sizes` maps the symbols of symbolic sizes to the largest ones, for which bytes are counted.
    `accumulation.failed` is called where an allocation fails in the backward. In the first run, in which kernels are
    timed, torch's allocator for CUDA holds at most `limit_bytes`. Call it within `joint.trace.active()`.
    Raises `CaptureError` where inductor fails."""
    if cuda_graphs_wanted():
        warnings.warn(NO_CUDA_GRAPHS, stacklevel=2)
    halves = _Halves(cut, joint, accumulation, limit_bytes)
    module, inputs = joint.trace.module, joint.trace.region.inputs
    try:
        # A copy, because inductor changes the module, and another plan may compile the region again.
        run = compile_by_inductor(copy_graph_module(module), inputs, halves.partition, halves.made, lambda: halves.key)
    except InductorFailed as failure:
        raise not_compiled(failure) from failure
    with sizes_up_to(allowed_sizes):
        return run, halves.footprint()


@dataclass
class _Halves:
    """The two halves of one compilation, the forward and the backward, as they are partitioned and as inductor compiled
    them."""

    cut: Callable[[], tuple[fx.GraphModule, fx.GraphModule]]
    joint: JointGraph
    accumulation: Accumulation
    limit_bytes: int | None
    forward: Half | None = None
    backward: Half | None = None
    handing: _Handing | None = None
    key: str = "no plan"
    """A key for inductor's cache: a hash of both halves, if there are any."""

    def partition(self, joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        """The forward and backward as planned, for inductor to compile. The joint graph that inductor passes, the
        planned one traced again, is not used."""
        assert num_fwd_outputs == self.joint.forward_outputs, (
            "inductor traced a graph with another number of outputs than the planned one"
        )
        forward, backward = self.cut()
        self.handing = _Handing(backward)
        inputs = {node.name for node in forward.graph.find_nodes(op="placeholder")}
        for half in (forward, backward):
            spell_casts(half)
            keep_products_early(half)
            hold_values(half, inputs)
        texts = format_graph(forward.graph), format_graph(backward.graph)
        self.key = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return forward, backward

    def made(self, compiled: Any, inputs: list[fx.Node], is_backward: bool) -> Callable[..., Any]:
        """Record a compiled half, and return the function that runs it."""
        half = Half(compiled.source_code, inputs)
        run = compiled if self.limit_bytes is None else _timed_within(compiled, self.limit_bytes)
        if is_backward:
            self.backward = half
            taking = run if self.handing is None else self.handing.taking(run)
            return _boxed(telling(withholding(taking, self.joint), self.accumulation))
        self.forward = half
        return _boxed(run)

    def footprint(self) -> Footprint | None:
        """The bytes that the compiled halves hold; None for a region without gradients, and where the dry run fails."""
        if self.forward is None or self.backward is None:
            return None
        # Values from which deferred outputs are computed are freed when the backward begins, or held until an optimizer
        # has stepped (`PendingForward.until_backward`).
        deferred, outputs, released = self.joint.trace.region.deferred, self.joint.forward_outputs, self.joint.released
        taken = frozenset(range(outputs if deferred is None else len(deferred.returned), outputs))
        try:
            return footprint(self.forward, self.backward, outputs, released, taken - released)
        except Exception as failure:  # another version of inductor may generate code of any kind
            reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            warnings.warn(
                "memopt cannot find the bytes that inductor's code holds, and assumes those of the plan, which a step "
                f"may exceed ({reason}); with backend='aten', plain operators run, whose bytes are known",
                stacklevel=2,
            )
            return None


def _timed_within(compiled: Callable[[list[Any]], Any], limit_bytes: int) -> Callable[[list[Any]], Any]:
    """A compiled forward or backward in whose first run, which times its kernels, torch's allocator for CUDA holds at
    most `limit_bytes`."""
    timed = False

    def run(arguments: list[Any]) -> Any:
        nonlocal timed
        if timed:
            return compiled(arguments)
        with autotuning_within(limit_bytes):
            results = compiled(arguments)
        timed = True
        return results

    return run


def _boxed(compiled: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A compiled half as a function that takes its inputs in one list, run without autocast."""

    def run(arguments: list[Any]) -> Any:
        with without_autocast():
            return compiled(arguments)

    return mark_boxed(run)


_CAST = torch.ops.prims.convert_element_type.default


def spell_casts(half: fx.GraphModule) -> None:
    """Replace the `aten._to_copy` casts that passes insert into joint graphs by `prims.convert_element_type`, into
    which inductor decomposes them; at this stage inductor no longer does so itself. Edits the graph."""
    for node in half.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if set(node.kwargs) == {"dtype"}:
            node.target, node.args, node.kwargs = _CAST, (node.args[0], node.kwargs["dtype"]), {}
    half.recompile()


aten = torch.ops.aten


def keep_products_early(half: fx.GraphModule) -> None:
    """Prevent inductor from fusing an `add` with a matrix product that is computed much earlier. Edits the graph.

    Inductor would replace both by one `addmm` in the position of the add, which keeps both operands of the product
    alive until then: for the gradient of a weight that is used twice, through the whole backward. It looks for an add
    that reads a product directly, so here the add reads the product through two views, which cost nothing."""
    place = {node: number for number, node in enumerate(half.graph.nodes)}
    barriers = [place[node] for node in half.graph.nodes if _is_barrier(node)]
    for add in half.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for product in add.all_input_nodes:
            if product.target is aten.mm.default and any(place[product] < barrier < place[add] for barrier in barriers):
                add.replace_input_with(product, _transposed_twice(product, add))
    half.recompile()


def hold_values(half: fx.GraphModule, inputs: Collection[str]) -> None:
    """Have inductor write elementwise values to memory where the kernels that read them would otherwise hold more.
    Edits the graph. `inputs` are the names of the region's inputs, which nothing frees.

    Inductor computes an elementwise value of few arguments anew in each kernel that reads it, and holds the arguments
    until the last of these kernels. If a branch of the model reads the sum of two gradients late, for example, both
    gradients are held until then instead of their sum."""
    for node in values_to_hold(half.graph, inputs):
        with half.graph.inserting_after(node):
            held = half.graph.call_function(hold, (node,))
        held.meta.update(node.meta)
        node.replace_all_uses_with(held, delete_user_cb=lambda user, held=held: user is not held)  # type: ignore[misc]
    half.recompile()


# A value is written to memory if otherwise more than this many times its bytes would be held longer.
_HELD_LONGER = 1.05


def values_to_hold(graph: fx.Graph, inputs: Collection[str]) -> list[fx.Node]:
    """The values that `hold_values` has inductor write to memory. Each is computed from larger tensors, which would be
    held longer if every kernel that reads the value computed it anew."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    barriers = [place[node] for node in graph.nodes if _is_barrier(node)]
    ends = {node: max((place[reader] for reader in readers_of(node)), default=0) for node in graph.nodes}
    computed_from: dict[fx.Node, frozenset[fx.Node]] = {}
    found = []
    for node in graph.nodes:
        if not (is_elementwise(node) and all(map(can_inline, readers_of(node)))):
            continue
        arguments = {behind_views(source) for source in node.all_input_nodes if source.name not in inputs}
        reads = frozenset().union(*(computed_from.get(argument, {argument}) for argument in arguments))
        longer = [read for read in reads if bisect_right(barriers, ends[read]) < bisect_left(barriers, ends[node])]
        if _bytes(longer) > _HELD_LONGER * _bytes([node]):
            found.append(node)
            continue
        computed_from[node] = reads
        ends |= dict.fromkeys(longer, ends[node])
    return found


def _bytes(nodes: Iterable[fx.Node]) -> int:
    values = [node.meta["val"] for node in nodes]
    return sum(storage_bytes(value) for value in values if isinstance(value, torch.Tensor))


def _transposed_twice(product: fx.Node, before: fx.Node) -> fx.Node:
    """The product transposed twice, by views inserted before the node `before`."""
    for _ in range(2):
        with before.graph.inserting_before(before):
            transposed = before.graph.call_function(aten.permute.default, (product, [1, 0]))
        transposed.meta.update(product.meta, val=product.meta["val"].t())
        product = transposed
    return product


def _is_barrier(node: fx.Node) -> bool:
    """Whether the node runs as a kernel of its own."""
    return node.op == "call_function" and not (can_inline(node) or is_view(node))


_running = threading.local()
"""`handing`: for the backward that runs in this thread, the modules that take gradients, and a dict of those that they
return, by the module's number."""


@torch.library.custom_op("memopt::hand_gradient", mutates_args=())
def hand_gradient(gradient: Tensor, number: int) -> Tensor:
    """Pass a gradient to the `AccumulateGradient` module with this number in the running backward. A gradient that the
    module returns is kept as a clone, for autograd. Returns an empty tensor, so that `gradient` is freed after this."""
    takers, kept = _running.handing
    returned = takers[number](gradient)
    if returned is not None:
        kept[number] = returned.clone()
    return gradient.new_empty(0)


@hand_gradient.register_fake
def _(gradient: Tensor, number: int) -> Tensor:
    return gradient.new_empty(0)


class _Handing:
    """Replaces the modules of a backward graph that take gradients by calls of `hand_gradient`. Edits the graph."""

    def __init__(self, backward: fx.GraphModule) -> None:
        self.modules: list[AccumulateGradient] = []
        for node in backward.graph.find_nodes(op="call_module"):
            self._replace(backward, node)
        self.numbers = [_number(result) for result in graph_results(backward.graph)]
        """For each result of the backward the number of its module; -1 for a result without one."""
        backward.delete_all_unused_submodules()
        backward.recompile()

    def _replace(self, backward: fx.GraphModule, node: fx.Node) -> None:
        (gradient,) = node.all_input_nodes
        with backward.graph.inserting_after(node):
            handed = backward.graph.call_function(
                torch.ops.memopt.hand_gradient.default, (gradient, len(self.modules)), name=node.name
            )
        handed.meta.update(node.meta, val=gradient.meta["val"].new_empty(0))
        node.replace_all_uses_with(handed)
        backward.graph.erase_node(node)
        module = backward.get_submodule(str(node.target))
        assert isinstance(module, AccumulateGradient)
        self.modules.append(module)

    def taking(self, backward: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """A function that runs the compiled `backward`, whose gradients go to the modules as soon as each is computed;
        None takes the place of a gradient that a module took."""

        def run(arguments: list[Any]) -> list[Tensor | None]:
            before = getattr(_running, "handing", None)
            # Asked here, because autograd does not know its current node inside an operator.
            takers = [functools.partial(module, receiver=module.receiver()) for module in self.modules]
            returned: dict[int, Tensor] = {}
            _running.handing = takers, returned
            try:
                pairs = zip(self.numbers, backward(arguments), strict=True)
                return [returned.get(number) if number >= 0 else result for number, result in pairs]
            finally:
                _running.handing = before

        return run if self.modules else backward


def _number(result: object) -> int:
    """The number of the module that a result was passed to; -1 for a result without one."""
    if isinstance(result, fx.Node) and result.target is torch.ops.memopt.hand_gradient.default:
        number = result.args[1]
        assert isinstance(number, int)
        return number
    return -1
