"""Checks a graph against itself: its structure, and each node's stored value against what its operator gives.

`graph.lint()` alone passes a graph whose dtypes are stale. Here every call is run on the stored fake values of its
arguments, one node at a time, and the result is compared with the stored one. Checking node by node needs no order
and no inputs, and finds the faulty node itself.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from passes.compat import depends_on_data, free_unbacked_symbols, statically_known_true
from passes.graphs.edit import propagating, stored_value
from passes.graphs.graph_text import format_dtype, format_value
from passes.graphs.node_facts import OPERATOR_OVERLOAD, argument_key, attribute_of, sources_of, tensors, value_kind
from passes.graphs.op_kinds import OF_OUT

_MISSING = object()
_OUT_ARGUMENTS = ("out", "grad_input")
"""The names of arguments that a result is written to."""


class VerifyError(ValueError):
    """Raised where a graph is inconsistent; the message names the node, what is wrong, and what to do."""

    def __init__(self, node: str | None, problem: str, mend: str) -> None:
        where = f"node {node}: " if node else ""
        super().__init__(f"{where}{problem}; {mend}")
        self.node = node
        self.problem = problem
        self.mend = mend

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.node, self.problem, self.mend)


def verify(graph_module: GraphModule, *, before: GraphModule | None = None) -> None:
    """Raises `VerifyError` unless the graph is well formed and the `meta["val"]` of every node is what its operator
    returns.

    Shape, dtype, device, layout and stride are compared; sizes that depend on data are not, nor are the strides of
    dimensions of size 1. No random number is drawn and no guard is added to the shape environment.

    Args:
        graph_module: an ATen graph whose nodes carry fake tensors in `meta["val"]`; not modified.
        before: the graph this one was made from, itself verified: only nodes that are new, changed or fed by a changed
            value are checked.
    """
    graph = graph_module.graph
    check_structure(graph)
    suspects = list(graph.nodes) if before is None else changed_nodes(before.graph, graph)
    checked: set[Hashable] = set()
    with propagating(_fake_mode(graph)):
        for node in suspects:
            kind = _kind(node)
            if kind is None or kind not in checked:
                _check_node(node)
                checked.add(kind)


def _kind(node: Node) -> Hashable | None:
    """A key of an operator's call: its arguments, and the kinds of the values that it reads and stores. Of two calls
    with equal keys only one has to be checked. None where a result may depend on more: for calls of anything else, and
    for values that are not fake tensors."""
    if not isinstance(node.target, OPERATOR_OVERLOAD) or any("val" not in source.meta for source in sources_of(node)):
        return None
    values = [source.meta["val"] for source in sources_of(node)]
    found = [tensor for value in (*values, node.meta.get("val")) for tensor in tensors(value)]
    if not all(map(_is_fake, found)):
        return None
    kinds = tuple(map(value_kind, values)), value_kind(node.meta.get("val"))
    return node.target, argument_key((node.args, node.kwargs), alike=True), kinds


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake, and no constant that it stands for is known."""
    return getattr(tensor, "fake_mode", None) is not None and getattr(tensor, "constant", None) is None


def named_nodes(graph: Graph, names: Sequence[str]) -> list[Node]:
    """The nodes with these names. Raises `VerifyError` for a name that no node has."""
    nodes = {node.name: node for node in graph.nodes}
    for name in names:
        if name not in nodes:
            raise VerifyError(name, "there is no such node", "give names of nodes in the graph that the pass rewrites")
    return [nodes[name] for name in names]


def check_structure(graph: Graph) -> None:
    """Raises `VerifyError` unless `graph.lint()` passes and every node that is read has a `meta["val"]`."""
    try:
        graph.lint()
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        # The rest of the message is the whole graph.
        first_line, *_ = str(error).splitlines()
        mend = "define each node once, before its users, in this graph"
        raise VerifyError(None, f"graph.lint() says: {first_line}", mend) from error
    for node in graph.nodes:
        if "val" not in node.meta and node.users and node.op in ("placeholder", "call_function", "call_method"):
            mend = 'set node.meta["val"] to its fake value in the pass that makes this node'
            raise VerifyError(node.name, 'it has no meta["val"]', mend)


def check_signature(before: GraphModule, after: GraphModule) -> None:
    """Raises `VerifyError` unless both graphs take the same inputs and return as many values of the same types."""
    old, new = ([str(node.target) for node in module.graph.find_nodes(op="placeholder")] for module in (before, after))
    mend = "restore inputs and outputs, or set keeps_signature = False in the pass"
    if old != new:
        raise VerifyError(None, f"the inputs changed from {old} to {new}", mend)
    old_outputs, new_outputs = (module.graph.output_node() for module in (before, after))
    old_text, new_text = (
        [format_value(value.meta.get("val")) if isinstance(value, Node) else repr(value) for value in _flat(node.args)]
        for node in (old_outputs, new_outputs)
    )
    if len(old_text) != len(new_text):
        raise VerifyError(new_outputs.name, f"{len(old_text)} outputs became {len(new_text)}", mend)
    for index, (was, now) in enumerate(zip(old_text, new_text, strict=True)):
        if was != now:
            raise VerifyError(new_outputs.name, f"output {index} changed from {was} to {now}", mend)


def _flat(argument: Any) -> Iterator[Any]:
    if isinstance(argument, (tuple, list)):
        for element in argument:
            yield from _flat(element)
    else:
        yield argument


def changed_nodes(before: Graph, after: Graph) -> list[Node]:
    """The nodes of `after` that have no namesake in `before`, or whose call, `meta["val"]` or arguments' `meta["val"]`
    differ from their namesake's.

    Values are compared by identity: a copied node keeps its value, a pass that sets one sets a new one."""
    old = {node.name: node for node in before.nodes}

    def same_value(node: Node) -> bool:
        return node.name in old and old[node.name].meta.get("val", _MISSING) is node.meta.get("val", _MISSING)

    def same(node: Node) -> bool:
        if not same_value(node) or not all(same_value(source) for source in node.all_input_nodes):
            return False
        was = old[node.name]
        same_call = was.target == node.target and argument_key(was.args) == argument_key(node.args)
        return same_call and argument_key(was.kwargs) == argument_key(node.kwargs)

    return [node for node in after.nodes if not same(node)]


def _fake_mode(graph: Graph) -> Any:
    mode = None
    for node in graph.nodes:
        for tensor in tensors(node.meta.get("val")):
            found = getattr(tensor, "fake_mode", None)
            # A saved CPU random state is a real tensor even when it was made under a fake mode.
            if found is None:
                continue
            if mode is not None and found is not mode:
                raise VerifyError(node.name, "its meta['val'] has another FakeTensorMode", "trace the graph under one")
            mode = found
    return mode


def _check_node(node: Node) -> None:
    if node.op in ("placeholder", "output"):
        return
    try:
        actual = _run(node)
    except VerifyError:
        raise
    except Exception as error:
        raise VerifyError(
            node.name,
            f"the operator cannot run on the fake tensors that the arguments have in meta['val']: {error}",
            "correct the arguments or their metadata",
        ) from error
    stored = node.meta.get("val")
    difference = _difference(stored, actual)
    if difference:
        raise VerifyError(node.name, difference, 'set meta["val"] to what the operator returns')


def _run(node: Node) -> Any:
    if node.op == "get_attr":
        # Subgraphs of higher-order operators are held as attributes too, and have no value of their own.
        held = attribute_of(node)
        return held if isinstance(held, torch.Tensor) else node.meta.get("val")
    if node.op == "call_module":
        raise VerifyError(node.name, "it calls a module", "trace through the module, so that the graph calls operators")
    args, kwargs = map_arg((node.args, node.kwargs), stored_value)
    if isinstance(node.target, OPERATOR_OVERLOAD) and node.is_impure(impure_random=False):
        # An in-place operator may change its argument's sizes: give it a view of the stored value.
        args, kwargs = map_aggregate(
            (args, kwargs), lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
        )
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    try:
        return node.target(*args, **kwargs)
    except Exception as error:
        plain = OF_OUT.get(node.target)
        if plain is None or not depends_on_data(error):
            raise
        # Torch 2.11 copies the result into `out`, and asks whether a size that depends on data is 1.
        return plain(*args, **{name: kwargs[name] for name in kwargs if name not in _OUT_ARGUMENTS})


def _difference(stored: Any, actual: Any) -> str:
    """Returns the difference between the stored and the actual result in words; "" if they agree."""
    if isinstance(stored, (tuple, list)) and isinstance(actual, (tuple, list)):
        if len(stored) != len(actual):
            return f"meta['val'] says {len(stored)} outputs, its operator returns {len(actual)}"
        found = (_difference(*pair) for pair in zip(stored, actual, strict=True))
        return next((f"output {index}: {difference}" for index, difference in enumerate(found) if difference), "")
    if isinstance(stored, torch.Tensor) and isinstance(actual, torch.Tensor):
        for what in ("dtype", "device", "layout"):
            one, other = getattr(stored, what), getattr(actual, what)
            if one != other:
                says, returns = (format_dtype(kind) if what == "dtype" else kind for kind in (one, other))
                return f"meta['val'] says {what} {says}, its operator returns {returns}"
        if not _same_numbers(tuple(stored.shape), tuple(actual.shape)):
            return f"meta['val'] says shape {list(stored.shape)}, its operator returns {list(actual.shape)}"
        if stored.layout == torch.strided and not _same_strides(stored, actual):
            return f"meta['val'] says stride {list(stored.stride())}, its operator returns {list(actual.stride())}"
        return ""
    if _is_number(stored) and _is_number(actual):
        return (
            "" if _same_numbers((stored,), (actual,)) else f"meta['val'] says {stored}, its operator returns {actual}"
        )
    if type(stored) is not type(actual):
        return f"meta['val'] says {format_value(stored)}, its operator returns {format_value(actual)}"
    return ""


def _same_strides(stored: torch.Tensor, actual: torch.Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike: a dimension of size 1 may have any stride."""
    strides = zip(stored.shape, stored.stride(), actual.stride(), strict=True)
    return all(_same_number(one, other) for size, one, other in strides if not statically_known_true(size == 1))


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _same_numbers(stored: tuple[Any, ...], actual: tuple[Any, ...]) -> bool:
    return len(stored) == len(actual) and all(_same_number(*pair) for pair in zip(stored, actual, strict=True))


def _same_number(stored: Any, actual: Any) -> bool:
    if isinstance(stored, (bool, int, float)) and isinstance(actual, (bool, int, float)):
        return stored == actual
    # Every run of nonzero() or item() makes new symbols, so that two right results differ in names.
    if free_unbacked_symbols((stored, actual)):
        return True
    return statically_known_true(stored == actual)
