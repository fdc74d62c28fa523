"""The outputs of a region beside its loss: which are not differentiated, which the region does not return because
pieces of its forward compute them on demand, and from which others are computed."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.dynamo_graph import result_values
from memopt.compat.autograd import edge_of, edges_reached, is_differentiable
from memopt.compat.fakes import FakeTensor
from memopt.compat.operators import ENTERS_AUTOCAST, LEAVES_AUTOCAST, SETS_GRAD_MODE, RunningBy, schema_of
from memopt.compat.symbols import data_symbols_of, largest_value
from passes.graphs.edit import LazyCode
from passes.graphs.node_facts import graph_results

SMALLEST_BYTES = 16 * 1024
"""Outputs of at most this size are always returned: to defer them would save too little."""
SMALL_SHARE = 1 / 64
"""Outputs that only a second forward could give are returned if they take less than this share of the parameters."""
_MOST_NODES = 16
"""The most calls between an output and the values that it is computed from."""


def detach_all_but_loss(graph_module: fx.GraphModule) -> frozenset[int]:
    """Detach the outputs that are not scalars, if the differentiable scalar outputs are the loss, that is, if they
    depend on every parameter that another output depends on. Edits the graph, and returns the positions of the outputs
    that it has detached.

    Without this, autograd would make a zero gradient for each such output (the logits of a language model, the keys and
    values of its cache), and the graph would carry it through the backward. Scalars that do not depend on all of these
    parameters (a learned temperature, a commitment loss, a balance between experts) are a part of a loss that the
    caller computes: then no output is detached. If a gradient does arrive at a detached output, a second forward
    computes the gradients that follow from it (`memopt.run.replay`)."""
    output = graph_module.graph.output_node()
    results = graph_results(graph_module.graph)
    differentiable = {
        position: node
        for position, node in enumerate(results)
        if isinstance(node, fx.Node) and _requires_grad(node.meta.get("example_value"))
    }
    large = {position: node for position, node in differentiable.items() if node.meta["example_value"].dim() > 0}
    scalars = [node for position, node in differentiable.items() if position not in large]
    if not _computed_from(large.values()) <= _computed_from(scalars):
        return frozenset()
    with graph_module.graph.inserting_before(output):
        detached = {position: graph_module.graph.call_method("detach", (node,)) for position, node in large.items()}
    output.args = (tuple(detached.get(position, node) for position, node in enumerate(results)),)
    graph_module.recompile()
    return frozenset(large)


def _computed_from(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The parameters, frozen ones too, and the other differentiable inputs that nodes are computed from."""
    seen, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    inputs = ((node, node.meta.get("example_value")) for node in seen if node.op == "placeholder")
    return {node for node, value in inputs if isinstance(value, nn.Parameter) or _requires_grad(value)}


def example_of(result: Any) -> torch.Tensor | None:
    """The fake tensor that Dynamo traced for `result`, or for the value that it detaches; None where there is none."""
    if not isinstance(result, fx.Node):
        return None
    node = result if "example_value" in result.meta else next(iter(result.args), None)
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of a region's forward graph that computes, on demand, outputs which the region does not return."""

    module: fx.GraphModule = field(repr=False)
    """Takes the region's inputs `inputs`, then the value `taken` if there is one, and returns the outputs."""
    inputs: tuple[int, ...]
    """Numbers of the region's inputs that it reads."""
    taken: fx.Node | None
    """The value of the forward that it starts from; None for a second run of the forward from its inputs."""

    @property
    def draws(self) -> bool:
        """Whether the piece may draw random numbers. It must then run with the random generators in the state in which
        the forward began."""
        return self.taken is None

    def run(self, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The outputs. `arguments` are the values of the region's inputs that the piece reads, then the value of the
        forward that it starts from, if any; this value may have another dtype than in the plain forward."""
        given = list(arguments)
        if self.taken is not None:
            given[-1] = given[-1].to(_example(self.taken).dtype)
        results: tuple[torch.Tensor, ...] = self.module(*given)
        return results


@dataclass(frozen=True, eq=False)
class Group:
    """Outputs that are computed together when one of them is first read."""

    positions: tuple[int, ...]
    """Their positions among the outputs of the model's call."""
    examples: tuple[torch.Tensor, ...] = field(repr=False)
    """A fake tensor for each of these outputs."""
    head: Piece | None
    """Computes them from a value that the region returns in their place; None where only a second forward does."""
    forward: Piece | None
    """Computes them by a second run of the forward; None where that would change state, as running statistics."""


@dataclass(frozen=True, eq=False)
class DeferredOutputs:
    """The outputs that a region does not return but computes on demand, and the values that it returns instead."""

    groups: tuple[Group, ...]
    returned: tuple[int, ...]
    """The positions, among the outputs of the model's call, of the outputs that the region does return."""
    taken: tuple[fx.Node, ...]
    """The values that the region returns after its outputs, from which `Group.head` computes the deferred ones."""

    @property
    def released(self) -> frozenset[int]:
        """The positions among the region's results of values returned in place of outputs and freed when the backward
        begins. Outputs that are first read after that are computed by a second run of the forward."""
        needed = {group.head.taken for group in self.groups if group.head and not group.forward}
        first = len(self.returned)
        return frozenset(first + number for number, node in enumerate(self.taken) if node not in needed)

    @property
    def bytes(self) -> int:
        """The bytes of the outputs that are not returned."""
        return sum(_bytes(example) for group in self.groups for example in group.examples)


def defer_outputs(graph_module: fx.GraphModule, detached: Collection[int]) -> DeferredOutputs | None:
    """Change a region's graph to return, instead of large outputs, the smaller values that they can be computed from.

    `detached` has the positions of the outputs that may be deferred; each is a call of `detach`. An output is deferred
    alone where few operators compute it from a value of at most half of its bytes (logits of a language model, from
    hidden states and the head's weight). The others (keys and values of a cache) are deferred together where they have
    many bytes and a second run of the region's forward can compute them. Edits the graph; returns None, with the graph
    unchanged, where nothing is deferred."""
    output = graph_module.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    large = {
        position: node
        for position in sorted(detached)
        if _is_known(node := results[position].args[0]) and _bytes(_example(node)) > SMALLEST_BYTES
    }
    found: list[Group] = []
    for position, node in large.items():
        if head := _head(graph_module, node):
            found.append(Group((position,), (_example(node),), head, _second_forward(graph_module, [node])))
    heads = {position for one in found for position in one.positions}
    others = {position: node for position, node in large.items() if position not in heads}
    if _worth_a_forward(graph_module, others) and (forward := _second_forward(graph_module, [*others.values()])):
        found.append(Group(tuple(others), tuple(map(_example, others.values())), None, forward))
    if not found:
        return None
    taken = tuple(dict.fromkeys(one.head.taken for one in found if one.head and one.head.taken))
    gone = {position for one in found for position in one.positions}
    returned = tuple(position for position in range(len(results)) if position not in gone)
    with graph_module.graph.inserting_before(output):
        given = [graph_module.graph.call_method("detach", (node,)) for node in taken]
    output.args = ((*(results[position] for position in returned), *given),)
    for position in gone:
        graph_module.graph.erase_node(results[position])
        if position in heads:
            _erase_unread(graph_module.graph, large[position])
    graph_module.recompile()
    return DeferredOutputs(tuple(found), returned, taken)


def _worth_a_forward(graph_module: fx.GraphModule, outputs: Mapping[int, fx.Node]) -> bool:
    """Whether outputs that only a second forward gives are large enough to be deferred."""
    given = (node.meta.get("example_value") for node in graph_module.graph.find_nodes(op="placeholder"))
    weights = sum(_bytes(value) for value in given if isinstance(value, nn.Parameter))
    return sum(_bytes(_example(node)) for node in outputs.values()) > SMALL_SHARE * weights


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a pure node that nothing reads, and what only it has read."""
    if node.users or node.op == "placeholder":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for given in inputs:
        _erase_unread(graph, given)


def _head(graph_module: fx.GraphModule, output: fx.Node) -> Piece | None:
    """The piece of a few pure operators that computes an output from one value of at most half of its bytes, and from
    inputs of the region; None where there is none."""
    most = _bytes(_example(output)) // 2
    inside: set[fx.Node] = set()
    taken: set[fx.Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node in inside or node in taken or node.op == "placeholder":
            continue
        value = node.meta.get("example_value")
        small = isinstance(value, torch.Tensor) and _bytes(value) <= most
        if small and node is not output and not _from_weights(node):
            taken.add(node)
            continue
        inside.add(node)
        waiting += node.all_input_nodes
        if len(inside) > _MOST_NODES or len(taken) > 1 or node.op not in ("call_function", "call_method"):
            return None
    if len(taken) != 1 or not all(map(_is_unwritten, (*inside, *taken, *_placeholders_of(inside)))):
        return None
    piece = _piece(graph_module, inside, [output], *taken)
    return piece if _is_pure(piece, _example(output)) else None


def _second_forward(graph_module: fx.GraphModule, outputs: Sequence[fx.Node]) -> Piece | None:
    """The piece that computes outputs from the region's inputs; None where a second run would change something."""
    nodes = list(graph_module.graph.nodes)
    last = max(map(nodes.index, outputs))
    inside = {node for node in nodes[: last + 1] if node.op != "placeholder"}
    if not all(map(_is_unwritten, _placeholders_of(inside))) or any(map(_acts_outside, inside)):
        return None
    return _piece(graph_module, inside, outputs)


def _piece(
    graph_module: fx.GraphModule, inside: set[fx.Node], outputs: Sequence[fx.Node], taken: fx.Node | None = None
) -> Piece:
    """The calls `inside`, in the autocast blocks that they stand in, as a graph of their own."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    read = set(_placeholders_of(inside))
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    numbers = tuple(number for number, node in enumerate(placeholders) if node in read)
    for node in (*(placeholders[number] for number in numbers), *([taken] if taken else ())):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    for node in graph_module.graph.nodes:
        autocast = node.op == "call_function" and node.target in (ENTERS_AUTOCAST, LEAVES_AUTOCAST)
        if (node in inside and node.target is not SETS_GRAD_MODE) or autocast:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Piece(LazyCode(graph_module, graph), numbers, taken)


def _placeholders_of(nodes: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The region's inputs that these nodes read."""
    return (given for node in nodes for given in node.all_input_nodes if given.op == "placeholder")


def _example(node: fx.Node) -> torch.Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, torch.Tensor)
    return value


def _is_known(node: fx.Node) -> bool:
    """Whether a node computes a dense tensor whose sizes are known once those of the inputs are."""
    value = node.meta.get("example_value")
    return (
        node.op != "placeholder"
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not data_symbols_of(value)
    )


def _is_unwritten(node: fx.Node) -> bool:
    """Whether nothing in the forward writes to a node's value."""
    value = node.meta.get("example_value")
    return not isinstance(value, torch.Tensor) or value._version == 0


def _from_weights(node: fx.Node) -> bool:
    """Whether a node's value is computed from parameters alone, by a few calls."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        source = waiting.pop()
        if source.op == "placeholder" and not isinstance(source.meta.get("example_value"), nn.Parameter):
            return False
        seen.add(source)
        waiting += [given for given in source.all_input_nodes if given not in seen]
        if len(seen) > _MOST_NODES:
            return False
    return any(source.op == "placeholder" for source in seen)


def _acts_outside(node: fx.Node) -> bool:
    """Whether a second run of a node may change what lies outside of the piece: statistics, or other ranks."""
    name = f"{getattr(node.target, '__module__', '')} {node.target}"
    return any(word in name for word in ("batch_norm", "instance_norm", "c10d", "distributed"))


def _bytes(value: torch.Tensor) -> int:
    """The bytes of a tensor's elements for the sizes at hand; `sys.maxsize` where the sizes depend on data."""
    if data_symbols_of(value):
        return sys.maxsize
    sizes = map(largest_value, value.shape)
    return math.prod(sizes) * value.element_size()


def _is_pure(piece: Piece, example: torch.Tensor) -> bool:
    """Whether a piece calls only ATen operators that write to nothing and draw no random numbers."""
    mode = example.fake_mode if isinstance(example, FakeTensor) else nullcontext()
    pure = True

    def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal pure
        schema = schema_of(func)
        aten = schema.name.startswith(("aten::", "prim::")) and "batch_norm" not in schema.name
        pure &= aten and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags
        return func(*args, **kwargs)

    with torch.no_grad(), mode, RunningBy(run):
        piece.run([node.meta["example_value"] for node in piece.module.graph.find_nodes(op="placeholder")])
    return pure


def feeding(graph_module: fx.GraphModule) -> dict[int, frozenset[int]]:
    """The inner outputs of a region, from which other results are computed: a dict from the position of each among the
    results of the graph to the positions of those results through which a gradient reaches it.

    They are found in the autograd graph of the stored values (`example_value`), which includes in-place writes, also
    through views."""
    stored = enumerate(result_values(graph_module))
    values = {at: value for at, value in stored if is_differentiable(value)}
    edges = {position: edge_of(value) for position, value in values.items()}
    reached = {position: edges_reached([value], ()) for position, value in values.items()}
    found = {
        position: frozenset(other for other in values if other != position and edge in reached[other])
        for position, edge in edges.items()
    }
    return {position: others for position, others in found.items() if others}
