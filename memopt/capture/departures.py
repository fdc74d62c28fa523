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


def departures(graphs: Iterable[fx.GraphModule]) -> tuple[str, ...]:
    """Returns a note for each kind of operator in Dynamo's graphs whose loss or gradients differ from eager mode's."""
    found = dict.fromkeys(name for graph_module in graphs for name in _names(graph_module.graph))
    return tuple(f"{name} is not computed bit by bit as in eager mode: {DEPARTURES[name]}" for name in found)


def _names(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        name = getattr(node.target, "__name__", node.target)
        name = "masked_fill" if name == "masked_fill_" else name
        if name in DEPARTURES and (name not in _WHERE or _WHERE[name](node)):
            yield name


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
