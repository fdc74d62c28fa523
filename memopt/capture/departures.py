"""Operators whose bits a trace does not keep: these are named in the notes of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

DEPARTURES: Mapping[str, str] = {
    "lstm": "it runs as the operators of its cells and not as oneDNN's one, which sums in another order",
    "gru": "its gates are computed out of place, which rounds in another way",
    "prod": "eager mode chooses the formula of its gradient by whether a factor is zero",
    "bernoulli_": "in memory that is not contiguous it draws in another order",
}
"""For each operator of torch, by name, why its traced form departs from eager mode."""


def departures(graphs: Iterable[fx.GraphModule]) -> tuple[str, ...]:
    """Returns a note for each kind of operator in Dynamo's graphs whose loss or gradients differ from eager mode's."""
    found = dict.fromkeys(name for graph_module in graphs for name in _names(graph_module.graph))
    return tuple(f"{name} is not computed bit by bit as in eager mode: {DEPARTURES[name]}" for name in found)


def _names(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        name = getattr(node.target, "__name__", node.target)
        if name in DEPARTURES and (name != "bernoulli_" or _is_strided(node.args[0])):
            yield name


def _is_strided(argument: object) -> bool:
    """Whether the value of an argument is a tensor that is not contiguous."""
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
    return isinstance(value, torch.Tensor) and not value.is_contiguous()
