"""Operators whose bits a trace does not keep: these are named in the notes of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import fx

DEPARTURES: Mapping[str, str] = {
    "lstm": "it runs as the operators of its cells and not as oneDNN's one, which sums in another order",
    "gru": "its gates are computed out of place, which rounds in another way",
    "prod": "eager mode chooses the formula of its gradient by whether a factor is zero",
    "masked_fill": "the gradient of a value that is a tensor is summed in another order",
    "bernoulli_": "in memory that is not contiguous it draws in another order",
}
"""For each operator of torch, by name, why its traced form departs from eager mode."""

BITS_DEPART = "is not computed bit by bit as in eager mode"

BUFFERS_WRITTEN_ONCE = (
    "buffers that are written inside of torch.utils.checkpoint are written once a step; in eager mode the block runs "
    "again in the backward and writes them twice (running statistics of BatchNorm move twice as far)"
)

ATTRIBUTES_BEFORE_BLOCKS = (
    f"torch.utils.checkpoint {BITS_DEPART}: an attribute such as x.mT, which the block takes of its input, is taken "
    "before the block, and the gradients of x are summed in another order"
)

BETWEEN_REGIONS = (
    "gradients that pass from one region to another may round otherwise than in eager mode: a region takes them in "
    "contiguous memory, and sums over a tensor run in the order of its memory"
)


def departures(graphs: Iterable[fx.GraphModule]) -> tuple[str, ...]:
    """Returns a note for each kind of operator in Dynamo's graphs whose loss or gradients differ from eager mode's."""
    graphs = tuple(graphs)
    found = dict.fromkeys(name for graph_module in graphs for name in _names(_nodes(graph_module)))
    notes = tuple(f"{name} {BITS_DEPART}: {DEPARTURES[name]}" for name in found)
    notes += (ATTRIBUTES_BEFORE_BLOCKS,) * any(map(_takes_attributes_before_blocks, graphs))
    return notes + (BUFFERS_WRITTEN_ONCE,) * any(map(_checkpoints_a_write, graphs))


def _nodes(graph_module: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph and of all graphs within it, such as those of blocks under `torch.utils.checkpoint`."""
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _names(nodes: Iterable[fx.Node]) -> Iterator[str]:
    for node in nodes:
        name = _name(node)
        name = "masked_fill" if name == "masked_fill_" else name
        if name in DEPARTURES and (name not in _WHERE or _WHERE[name](node)):
            yield name


def _checkpoints_a_write(graph_module: fx.GraphModule) -> bool:
    """Whether a block under `torch.utils.checkpoint` writes to one of its inputs."""
    calls = [node for node in _nodes(graph_module) if _name(node) == "tag_activation_checkpoint"]
    blocks = (getattr(node.graph.owning_module, str(node.args[0].target)) for node in calls)  # type: ignore[union-attr]
    return any(_writes(node) for block in blocks if isinstance(block, fx.GraphModule) for node in _nodes(block))


def _takes_attributes_before_blocks(graph_module: fx.GraphModule) -> bool:
    """Whether an attribute of a value with several uses is an input of a block under `torch.utils.checkpoint` and of
    nothing else: torch 2.13's Dynamo moves the attributes that a block takes out of it, torch 2.15's leaves them
    there."""
    blocks = [node for node in _nodes(graph_module) if _name(node) == "tag_activation_checkpoint"]
    inputs = [(block, value) for block in blocks for value in block.all_input_nodes if value.target is getattr]
    return any(set(value.users) == {block} and len(value.all_input_nodes[0].users) > 1 for block, value in inputs)


def _writes(node: fx.Node) -> bool:
    """Whether a call in Dynamo's graph writes to an input of the graph, as normalisation by batch statistics does."""
    name = _name(node)
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "setitem"
    target = node.args[0] if node.args else None
    written = in_place and isinstance(target, fx.Node) and target.op == "placeholder"
    return node.op.startswith("call") and (written or name == "batch_norm" or _moves_statistics(node))


def _moves_statistics(node: fx.Node) -> bool:
    """Whether a node is an instance norm with running statistics."""
    given = [*node.args[1:2], node.kwargs.get("running_mean")]
    return _name(node) == "instance_norm" and any(isinstance(value, fx.Node) for value in given)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _fills_with_a_parameter(node: fx.Node) -> bool:
    """Whether the value of a `masked_fill` requires a gradient."""
    value = _tensor(node.kwargs.get("value", node.args[-1]))
    return value is not None and value.requires_grad


def _is_strided(node: fx.Node) -> bool:
    """Whether the first argument of a node is a tensor that is not contiguous."""
    value = _tensor(node.args[0])
    return value is not None and not value.is_contiguous()


def _tensor(argument: object) -> torch.Tensor | None:
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


_WHERE: Mapping[str, Callable[[fx.Node], bool]] = {"bernoulli_": _is_strided, "masked_fill": _fills_with_a_parameter}
"""By name, the condition under which an operator departs; no condition for the others."""
