"""Edits that passes share: adding a call, replacing a node, and erasing nodes that nothing reads.

The stored values of calls that have changed are recomputed from those of their arguments. The Python code of a graph
that was edited is generated only when it is called or read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from passes.compat import enable_python_dispatcher
from passes.graphs.node_facts import attribute_of, binds_new_symbols, is_pure, tensors


def on_stored_values(graph: Graph) -> contextlib.AbstractContextManager[None]:
    """Returns a context for running operators on the graph's fake tensors (those in `node.meta["val"]`), without
    autograd, autocast or guards."""
    values = (tensor for node in graph.nodes for tensor in tensors(node.meta.get("val")))
    return propagating(next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None))


@contextlib.contextmanager
def propagating(mode: Any) -> Iterator[None]:
    """Context for running operators in the fake tensor mode `mode` (None: on the tensors as they are), without autograd
    or autocast. No guards and no pending symbols are left behind.

    With symbolic sizes, operators run by torch's Python implementations where there are any, as in tracing, since some
    kernels do not take such sizes."""
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
    """Sets a call's `meta["val"]` to what its operator returns for its arguments' `meta["val"]`. To be called within
    `on_stored_values`.

    A result whose sizes depend on data keeps its symbols; only its dtype is set, to that of the first argument."""
    if node.op != "call_function" or not all(map(_is_known, node.all_input_nodes)):
        return
    node.meta["val"] = result_of(node)


def result_of(node: Node, instead: Mapping[Node, Any] = MappingProxyType({})) -> Any:
    """Returns what a call's operator returns for its arguments' `meta["val"]`. `instead` maps nodes to values to use in
    place of their `meta["val"]`. A result whose sizes depend on data is treated as in `refresh`."""
    if binds_new_symbols(node):
        first = node.all_input_nodes[0]
        return _retyped(node.meta["val"], next(tensors(instead.get(first, first.meta["val"]))).dtype)
    args, kwargs = map_arg(
        (node.args, node.kwargs), lambda source: instead[source] if source in instead else stored_value(source)
    )
    target: Any = node.target
    return target(*args, **kwargs)


def _is_known(node: Node) -> bool:
    return "val" in node.meta or node.op == "get_attr"


def stored_value(node: Node) -> Any:
    """Returns a node's stored value, or what a `get_attr` without one names."""
    return node.meta["val"] if "val" in node.meta else attribute_of(node)


def restride(changes: Mapping[Node, Any]) -> bool:
    """Sets the `meta["val"]` of each node in `changes` to the value given there, whose strides may be new, and that of
    all later nodes whose strides change with them. To be called within `on_stored_values`.

    Returns False, and changes nothing, where an operator does not take the new strides, as a view may not, where a
    value cannot be computed, or where the strides of a result of the graph would change."""
    changed = {node: value for node, value in changes.items() if strides(value) != strides(node.meta["val"])}
    for node in next(iter(changed)).graph.nodes if changed else ():
        if node in changes or changed.keys().isdisjoint(node.all_input_nodes):
            continue
        if node.op != "call_function" or not all(map(_is_known, node.all_input_nodes)) or binds_new_symbols(node):
            return False
        try:
            value = result_of(node, changed)
        except (RuntimeError, ValueError):  # of kernels, and of fake ones
            return False
        if strides(value) != strides(node.meta["val"]):
            changed[node] = value
    for node, value in {**changes, **changed}.items():
        node.meta["val"] = value
    return True


def strides(value: Any) -> list[str]:
    """Returns the strides of each tensor in a node's `meta["val"]`, as text: comparing symbols would add guards."""
    return [str(tensor.stride()) for tensor in tensors(value)]


def _retyped(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_retyped(element, dtype) for element in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


_PLACE = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace")
"""The entries of `Node.meta` on the module and the line of code that a call comes from."""

_ORIGIN = (*_PLACE, "partitioner_tag", "autograd_backward", "custom")
"""The entries of `Node.meta` on where a call comes from: module, line of code, forward or backward, annotations."""


def place_calls(graph: Graph) -> None:
    """Sets module and line of code in the metadata of calls that have none, as torch's own patterns make them: a call
    gets those of the first call that reads it."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.users and not any(key in node.meta for key in _PLACE):
            reader = next(iter(node.users))
            node.meta.update({key: reader.meta[key] for key in _PLACE if key in reader.meta})


def new_call(like: Node, target: Any, *args: Any, node_name: str = "", **kwargs: Any) -> Node:
    """Returns a new call of an operator, made at the insertion point of `like`'s graph.

    Module, line of code and the tag of forward or backward in its metadata are copied from `like`. Its `meta["val"]` is
    computed from that of its arguments, so `new_call` must run within `on_stored_values`. Its name begins with
    `node_name`, by default with the operator's name without overload."""
    name = node_name or target.__name__.partition(".")[0]
    node = like.graph.create_node("call_function", target, args, kwargs, name=name)
    node.meta.update({key: like.meta[key] for key in _ORIGIN if key in like.meta})
    refresh(node)
    return node


def replace_node(node: Node, by: Node) -> None:
    """Makes all users of a node read `by` instead, and erases the node."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def erase_unread(nodes: Iterable[Node], erasable: Callable[[Node], bool] = is_pure) -> None:
    """Erases those of the nodes that nothing reads and that are `erasable`, and then inputs that have become so."""
    pending = list(dict.fromkeys(nodes))
    erased: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in erased or node.users or not erasable(node):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        pending += sources


class LazyCode(GraphModule):
    """A `GraphModule` whose `recompile` only drops the code, which is generated when it is next called or read.

    Generating the code of a graph of thousands of nodes takes longer than most passes over it."""

    def recompile(self) -> None:  # type: ignore[override]
        type(self).forward = LazyCode.forward  # type: ignore[method-assign]  # every graph module has its own class

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._compile()
        return self(*args, **kwargs)

    def _compile(self) -> None:
        if type(self).forward is LazyCode.forward:
            super().recompile()

    @property
    def code(self) -> str:
        self._compile()
        return super().code

    def __str__(self) -> str:
        self._compile()
        return super().__str__()

    def __reduce__(self) -> Any:
        return GraphModule(self, self.graph, type(self).__name__).__reduce__()
