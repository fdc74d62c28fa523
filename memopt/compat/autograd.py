"""Autograd: the backward pass that is running, and the hooks on a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from passes.compat import private, replaced

PRIVATE_NAMES = (
    *private("torch._C", "_will_engine_execute_node _current_autograd_node _current_graph_task_id"),
    *private("torch._C._autograd", "_get_current_graph_task_keep_graph"),
    *private("torch.autograd.graph", "Node._sequence_nr"),
    *private("torch.autograd.grad_mode", "_unsafe_preserve_version_counter"),
    *private("torch.nn.modules.batchnorm", "_BatchNorm"),
    *private("torch.nn.modules.instancenorm", "_InstanceNorm"),
    *private("torch", "Tensor._backward_hooks Tensor._post_accumulate_grad_hooks"),
    *private("torch._higher_order_ops.register_hook", "RegisterHookOp.__call__", since=(2, 13), needed=False),
)

_Leaf = TypeVar("_Leaf", bound=torch.Tensor)


class Fate(Enum):
    """The use that the running backward pass makes of the gradient of a leaf."""

    ACCUMULATED = "added to its .grad"
    RETURNED = "returned by torch.autograd.grad"
    DROPPED = "discarded"


def fate_of_gradient(leaf: torch.Tensor) -> Fate:
    """The use that the running backward pass will make of a leaf's gradient. To be called inside a backward pass."""
    return fate_at(torch.autograd.graph.get_gradient_edge(leaf).node)


def fate_at(node: Any) -> Fate:
    """The use that the running backward pass will make of the gradient of the leaf whose node this is."""
    try:
        return Fate.ACCUMULATED if torch._C._will_engine_execute_node(node) else Fate.DROPPED
    except RuntimeError:  # "A leaf node was passed … but we are currently running autograd.grad()"
        return Fate.RETURNED


def receivers() -> list[tuple[torch.Tensor | None, Fate]]:
    """For each tensor input of the captured region whose backward runs: the leaf that it was, and what autograd does
    with its gradient; None and `RETURNED` where it was no leaf.

    This is asked in every backward for all inputs at once, since a call for each of them takes longer than all else.
    """
    nodes: list[Any] = [node for node, _ in current_node().next_functions]
    leaves = [getattr(node, "variable", None) for node in nodes]
    executes = torch._C._will_engine_execute_node
    try:
        return [
            (leaf, Fate.RETURNED if leaf is None else Fate.ACCUMULATED if executes(node) else Fate.DROPPED)
            for leaf, node in zip(leaves, nodes, strict=True)
        ]
    except RuntimeError:  # autograd.grad() refuses the question for the leaves whose gradients it returns
        return [
            (leaf, Fate.RETURNED if leaf is None else fate_at(node)) for leaf, node in zip(leaves, nodes, strict=True)
        ]


def note_reached(outputs: Sequence[tuple[tuple[Any, int], object]]) -> None:
    """Note for an autograd node which of its outputs have a gradient in the running backward. `outputs` are the edges
    to the node, each with the number of its output, and the gradients. Nothing is noted for edges to several nodes, or
    in another order."""
    nodes, numbers = {id(node) for (node, _), _ in outputs}, [number for (_, number), _ in outputs]
    if len(nodes) == 1 and numbers == sorted(set(numbers)):
        (node, _), _ = outputs[0]
        node.metadata[_REACHED] = tuple(gradient is not None for _, gradient in outputs)


def reached_outputs() -> tuple[bool, ...] | None:
    """What `note_reached` noted for the autograd node that runs; None where it noted nothing."""
    node = current_node()
    return None if node is None else node.metadata.get(_REACHED)


_REACHED = "memopt reached"


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Returns a number that identifies the running backward pass, -1 outside of one."""

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the autograd node that runs now, None outside of a backward pass."""


def keeps_graph() -> bool:
    """Whether the running backward pass was started with `retain_graph=True`."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def running_statistics_unnoticed(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which autograd does not notice that running statistics are written to, as the kernels of eager mode
    write to them: their backward checks that they are as they were, and does not read them."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    norms = [module for module in model.modules() if isinstance(module, kinds)]
    found = [one for norm in norms for one in (norm.running_mean, norm.running_var) if one is not None]
    return _unsafe_preserve_version_counter(tuple(found)) if found else nullcontext()


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a leaf has any hooks."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def with_hooks(leaves: Iterable[_Leaf]) -> list[_Leaf]:
    """Those that have hooks. This is asked for all parameters at every call, and takes half the time of `has_hooks`."""
    return [
        leaf for leaf in leaves if leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
    ]  # fmt: skip


def hooks_left_out() -> AbstractContextManager[None]:
    """Context in which the calls of `Tensor.register_hook` that Dynamo wrote into a graph do nothing, for a run of the
    graph without gradients: a tensor that requires none takes no hook."""
    try:
        from torch._higher_order_ops.register_hook import RegisterHookOp
    except ImportError:  # before torch 2.13 Dynamo writes no such calls
        return nullcontext()
    return replaced(RegisterHookOp, "__call__", lambda self, tensor, body, *values: tensor)


def backward_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that `Tensor.register_hook` added to a leaf."""
    return list((tensor._backward_hooks or {}).values())


@contextmanager
def gradients_kept(outputs: Iterable[torch.Tensor]) -> Iterator[None]:
    """A block after which all leaves that `outputs` depend on have the gradients that they had before."""
    leaves = [(leaf, leaf.grad) for leaf in leaves_of(outputs)]
    try:
        yield
    finally:
        for leaf, gradient in leaves:
            leaf.grad = gradient


def leaves_of(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves with gradients that tensors depend on, each once."""
    for node in _nodes_of(outputs):
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf


def next_node_number() -> int:
    """A number above those of the autograd nodes that this thread has made, and below those of nodes that it will make.
    To be called with gradients enabled."""
    node: Any = torch.ones((), requires_grad=True).clone().grad_fn
    return int(node._sequence_nr())


def depends_on_earlier(outputs: Iterable[torch.Tensor], number: int) -> bool:
    """Whether tensors depend on an operator that ran before `next_node_number` returned `number`."""
    return any(node._sequence_nr() < number for node in _nodes_of(outputs))


def _nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes that tensors depend on, each once; those of leaves among them."""
    nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
    left: list[Any] = list(nodes)
    while left:
        node = left.pop()
        yield node
        found = {further for further, _ in node.next_functions if further is not None} - nodes
        nodes |= found
        left += found


class WatchingHook:
    """A hook on the accumulated gradient of a leaf that only takes note of it, so that a backward need not call it."""

    def __call__(self, leaf: torch.Tensor) -> None:
        raise NotImplementedError


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that `Tensor.register_post_accumulate_grad_hook` added to a leaf, without those that only watch."""
    return [hook for hook in _late_hooks(tensor) if not isinstance(hook, WatchingHook)]


def watching_hooks(tensor: torch.Tensor) -> list[WatchingHook]:
    """The hooks on the accumulated gradient of a leaf that only watch."""
    return [hook for hook in _late_hooks(tensor) if isinstance(hook, WatchingHook)]


def _late_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def hook_tables(tensor: torch.Tensor) -> list[dict[int, Callable[..., Any]]]:
    """The tables, by number, in which a leaf keeps its hooks: without an entry, autograd calls no hook."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [table for table in tables if table]


def saved_tensors(node: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that an `autograd.Function`'s node has saved; none for other nodes, and after their backward."""
    try:
        return tuple([tensor for tensor in getattr(node, "saved_tensors", ()) if isinstance(tensor, torch.Tensor)])
    except RuntimeError:  # freed, or changed since
        return ()


def free_saved_tensors(node: Any) -> None:
    """Free what an `autograd.Function`'s node has saved, as its backward does. To be called inside a backward pass that
    does not keep its graph."""
    node.maybe_clear_saved_tensors()
