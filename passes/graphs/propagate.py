"""Recomputes the stored values of calls that a pass has changed, from the stored values of their arguments."""

import contextlib
import operator
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from passes.compat import enable_python_dispatcher
from passes.graphs.node_facts import binds_new_symbols, tensors


def on_stored_values(graph: Graph) -> contextlib.AbstractContextManager[None]:
    """Returns a context that runs operators on the graph's fake tensors, without autograd, autocast or guards."""
    values = (tensor for node in graph.nodes for tensor in tensors(node.meta.get("val")))
    return propagating(next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None))


@contextlib.contextmanager
def propagating(mode: Any) -> Iterator[None]:
    """Runs operators on fake tensors without autograd or autocast, and leaves no guards and no pending symbols.

    As where the graph was traced, the operators that torch writes in Python take symbolic sizes that their kernels do
    not.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        if mode is not None:
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
                stack.enter_context(enable_python_dispatcher())
            stack.enter_context(mode)
        yield


def refresh(node: Node) -> None:
    """Sets a call's stored value to what its operator returns for those of its arguments; needs `on_stored_values`.

    Where sizes depend on data they keep their symbols, and only the dtype is set, to that of the first argument.
    """
    if node.op != "call_function" or not all(map(_is_known, node.all_input_nodes)):
        return
    node.meta["val"] = result_of(node)


def result_of(node: Node, instead: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """Returns what a call returns for the stored values of its arguments, or those `instead` of them; see `refresh`."""
    if binds_new_symbols(node):
        first = node.all_input_nodes[0]
        return _retyped(node.meta["val"], next(tensors(instead.get(first, first.meta["val"]))).dtype)
    args, kwargs = map_arg(
        (node.args, node.kwargs), lambda source: instead[source] if source in instead else _of(source)
    )
    target: Any = node.target
    return target(*args, **kwargs)


def _is_known(node: Node) -> bool:
    return "val" in node.meta or node.op == "get_attr"


def _of(node: Node) -> Any:
    """Returns a node's stored value; of a graph that an operator runs, as that of a custom function, the graph."""
    return node.meta["val"] if "val" in node.meta else operator.attrgetter(str(node.target))(node.graph.owning_module)


def values_after(changes: Mapping[Node, Any]) -> dict[Node, Any] | None:
    """Returns the stored values that a graph would have if some of its nodes had other strides: those of these nodes,
    with the values in `changes`, and of their readers, as far as strides change. None where an operator does not take
    them, as a view may not, where its value cannot be computed, or where an output of the graph would change. Needs
    `on_stored_values`."""
    changed = {node: value for node, value in changes.items() if strides(value) != strides(node.meta["val"])}
    if not changed:
        return dict(changes)
    for node in next(iter(changed)).graph.nodes:
        if node in changes or changed.keys().isdisjoint(node.all_input_nodes):
            continue
        if node.op != "call_function" or not all(map(_is_known, node.all_input_nodes)):
            return None
        if binds_new_symbols(node):
            return None
        try:
            value = result_of(node, changed)
        except (RuntimeError, ValueError):  # of kernels, and of fake ones
            return None
        if strides(value) != strides(node.meta["val"]):
            changed[node] = value
    return {**changes, **changed}


def store(values: Mapping[Node, Any]) -> None:
    """Sets the stored values of nodes."""
    for node, value in values.items():
        node.meta["val"] = value


def strides(value: Any) -> list[str]:
    """Returns the strides of each tensor in a stored value, as text, so that symbols in them leave no guards."""
    return [str(tensor.stride()) for tensor in tensors(value)]


def _retyped(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_retyped(element, dtype) for element in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
