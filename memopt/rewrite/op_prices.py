"""The price of an operator in a dtype: its time, forward and backward, and the bytes that it saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.compat.fakes import new_fake_mode
from memopt.compat.host import HOST
from memopt.compat.operators import OpOverload, overload_name, schema_of, tree_map
from memopt.device.hardware import Hardware
from memopt.device.op_call import OpCall, op_call
from memopt.device.storages import storage_bytes
from memopt.device.time_model import node_seconds
from memopt.rewrite.narrow import tolerated, worth_narrowing
from passes.graphs.aliases import storages
from passes.graphs.edit import propagating
from passes.graphs.node_facts import backward_nodes, graph_results, tensors
from passes.graphs.op_kinds import CAST_FIRST_ONLY

_RETYPED = (torch.float32, torch.bfloat16, torch.float16)


class Saved(Enum):
    """How an operator saves one of its operands, or its result, for its backward: not at all, in bf16, or whole."""

    NOTHING = 0
    ROUNDED = 1
    """A copy in bf16 is enough: see `memopt.rewrite.narrow`."""
    WHOLE = 2


@dataclass(frozen=True)
class OpPrice:
    """The price of one call in one dtype: its seconds, forward and backward, and what it saves for the backward."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    operands: tuple[Saved, ...] = ()
    """The way each operand is saved, in the order of `operands(node)`."""
    result: Saved = Saved.NOTHING
    inner_bytes: int = 0
    """Bytes that are saved besides operands and result: statistics of rows, masks, log-probabilities."""


@dataclass
class OpPrices:
    """Finds the price of calls on a device: seconds, forward and backward, and what is saved. Each kind of call is
    differentiated once, on fake tensors; nothing runs.

    With `narrows`, fp32 values that the backward may read in bf16 are priced as saved in bf16, since
    `memopt.rewrite.narrow` will rewrite the joint graph so."""

    hardware: Hardware
    narrows: bool = False
    _known: dict[Hashable, OpPrice | None] = field(default_factory=dict, repr=False)

    def price(self, node: fx.Node, dtype: torch.dtype, differentiated: Collection[fx.Node]) -> OpPrice | None:
        """Returns the seconds of the call `node`, forward and backward, with floating-point operands in `dtype`, and
        what it saves for the backward; None if it cannot be traced alone.

        Operands that are `differentiated` get gradients."""
        try:
            call = op_call(node)
        except ValueError:  # a size that depends on data, without bound
            return None
        if call is None:
            return None
        flags = tuple(operand in differentiated for operand in operands(node))
        key = call, dtype, flags
        if key not in self._known:
            self._known[key] = self._trace(call, dtype, flags)
        return self._known[key]

    def _trace(self, call: OpCall, dtype: torch.dtype, differentiated: tuple[bool, ...]) -> OpPrice | None:
        run = _functional(call.op)

        def run_with(leaves: Iterable[torch.Tensor]) -> Any:
            """Runs the call with other tensors instead of its own, in order."""
            given = iter(leaves)
            other = tree_map(lambda one: next(given) if isinstance(one, torch.Tensor) else one, (args, kwargs))
            return run(*other[0], **other[1])

        with propagating(new_fake_mode()), torch.enable_grad():
            args, kwargs = call.make_arguments(HOST.type)
            leaves = list(tensors([args, *kwargs.values()]))
            casts = len(leaves) if call.name not in CAST_FIRST_ONLY else 1
            leaves = [
                leaf.to(dtype) if place < casts and leaf.dtype in _RETYPED else leaf
                for place, leaf in enumerate(leaves)
            ]
            for leaf, needs in zip(leaves, differentiated, strict=True):
                leaf.requires_grad_(needs and leaf.is_floating_point())
            try:
                graph, results = _joint(run_with, leaves)
                return _read(graph, results, self.hardware, self.narrows)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):  # sizes that depend on data among them
                return None


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the nodes that a call reads tensors from, one entry for each tensor, in the order of the arguments."""
    sources: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), sources.append)
    return tuple(source for source in sources for _ in tensors(source.meta.get("val")))


def _functional(op: OpOverload) -> Callable[..., Any]:
    """Returns the out-of-place version of an in-place operator; other operators unchanged."""
    space, _, name = schema_of(op).name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, overload_name(op), op) if packet is not None else op


def _joint(call: Callable[[Iterable[torch.Tensor]], Any], leaves: list[torch.Tensor]) -> tuple[fx.Graph, int]:
    """Traces forward and backward of a call as AOTAutograd does: `primals_*`, `tangents_*` → results, gradients.

    Returns the graph and the number of results."""

    def flowing(result: Any) -> list[torch.Tensor]:
        return [tensor for tensor in tensors(result) if tensor.requires_grad]

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
        results = call(primals)
        wanted = [primal for primal in primals if primal.requires_grad]
        gradients = torch.autograd.grad(flowing(results), wanted, tangents, allow_unused=True) if tangents else ()
        return [*tensors(results), *(gradient for gradient in gradients if gradient is not None)]

    results = call(leaves)
    tangents = [torch.empty_like(value) for value in flowing(results)]
    return make_fx(joint)(leaves, tangents).graph, len(list(tensors(results)))


def _read(graph: fx.Graph, results: int, hardware: Hardware, narrows: bool) -> OpPrice:
    """Returns the price of a call, given the joint graph of it that `_joint` traced."""
    backward = backward_nodes(graph)
    primals = [node for node in graph.find_nodes(op="placeholder") if node not in backward]
    returned = graph_results(graph)
    seconds = {node: node_seconds(node, hardware) for node in graph.nodes if node.op == "call_function"}
    saved: dict[Hashable, tuple[Saved, int]] = {}
    for node in graph.nodes:
        if node in backward or node.op == "output" or not any(user in backward for user in node.users):
            continue
        rounded = narrows and worth_narrowing(node) and tolerated(node, backward)
        for storage, tensor in zip(storages(node), tensors(node.meta.get("val")), strict=False):
            before = saved.get(storage, (Saved.NOTHING, 0))[0]
            here = Saved.ROUNDED if rounded and before is not Saved.WHOLE else Saved.WHOLE
            saved[storage] = here, storage_bytes(tensor)

    def of(node: fx.Node | None) -> Saved:
        found = [saved.pop(storage, (Saved.NOTHING, 0))[0] for storage in (storages(node) if node is not None else ())]
        return max(found, key=lambda kind: kind.value, default=Saved.NOTHING)

    operands = tuple(map(of, primals))
    result = max(map(of, returned[:results]), key=lambda kind: kind.value, default=Saved.NOTHING)
    return OpPrice(
        forward_seconds=sum(group for node, group in seconds.items() if node not in backward),
        backward_seconds=sum(group for node, group in seconds.items() if node in backward),
        operands=operands,
        result=result,
        inner_bytes=sum(nbytes // (2 if how is Saved.ROUNDED else 1) for how, nbytes in saved.values()),
    )
