"""Recomputes the stored values of calls that a pass has changed, from the stored values of their arguments."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from passes.graphs.node_facts import binds_new_symbols, tensors


def on_stored_values(graph: Graph) -> contextlib.AbstractContextManager[None]:
    """Returns a context that runs operators on the graph's fake tensors, without autograd, autocast or guards."""
    values = (tensor for node in graph.nodes for tensor in tensors(node.meta.get("val")))
    return propagating(next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None))


@contextlib.contextmanager
def propagating(mode: Any) -> Iterator[None]:
    """Runs operators on fake tensors without autograd or autocast, and leaves no guards and no pending symbols."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        if mode is not None:
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(mode)
        yield


def refresh(node: Node) -> None:
    """Sets a call's stored value to what its operator returns for those of its arguments; needs `on_stored_values`.

    Where sizes depend on data they keep their symbols, and only the dtype is set, to that of the first argument. A call
    that runs graphs of its own, as `torch.autograd.Function` does, keeps its value: its arguments keep their dtypes.
    """
    if node.op != "call_function" or any("val" not in given.meta for given in node.all_input_nodes):
        return
    if binds_new_symbols(node):
        source = next(tensors(node.all_input_nodes[0].meta["val"]))
        node.meta["val"] = _retyped(node.meta["val"], source.dtype)
        return
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    target: Any = node.target
    node.meta["val"] = target(*args, **kwargs)


def _retyped(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_retyped(element, dtype) for element in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
