"""Operators that stand for what the cards of a tensor-parallel group exchange, in a step that is only planned.

Their results have the shapes and the memory of the real ones; where one runs, a card exchanges with copies of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from memopt.device.cluster import Ring
from memopt.device.storages import storage_bytes


def _repeated(value: Tensor, cards: int, dim: int) -> Tensor:
    return torch.cat([value] * cards, dim)


def _part(value: Tensor, cards: int, dim: int) -> Tensor:
    if value.shape[dim] % cards:
        raise ValueError(
            f"'tp': {cards} in mesh does not divide dimension {dim} of a value of shape {tuple(value.shape)}; give "
            "sequences that divide"
        )
    return value.narrow(dim, 0, value.shape[dim] // cards).clone(memory_format=torch.contiguous_format)


def _whole(value: Tensor, cards: int, dim: int) -> Tensor:
    return value.clone(memory_format=torch.contiguous_format)


def _operator(name: str, kernel: Callable[[Tensor, int, int], Tensor]) -> Any:
    """Defines an operator of the namespace `memopt`, and returns it."""
    schema = "(Tensor value, int cards, int dim) -> Tensor"
    torch.library.define(f"memopt::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"memopt::{name}", "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(f"memopt::{name}", kernel)
    return getattr(torch.ops.memopt, name)


GATHER_SHARDS = _operator("gather_shards", _repeated)
"""Every card gets the parts of all cards along `dim`; their gradients are summed, and each card gets its part."""
SCATTER_SUMS = _operator("scatter_sums", _part)
"""The values of all cards are summed, and each card gets its part along `dim`."""
GATHER_COPIES = _operator("gather_copies", _repeated)
"""As `GATHER_SHARDS`, of a result that all cards read alike: each card takes its part of one gradient."""
TAKE_PART = _operator("take_part", _part)
"""Each card takes its part along `dim` of a value that all cards have; nothing is exchanged but gradients."""
SUM_SHARDS = _operator("sum_shards", _whole)
"""The values of all cards are summed on all of them (`dim` means nothing); a gradient is the same on all cards."""

_BACKWARDS = {
    GATHER_SHARDS: SCATTER_SUMS,
    SCATTER_SUMS: GATHER_SHARDS,
    GATHER_COPIES: TAKE_PART,
    TAKE_PART: GATHER_COPIES,
}
_GATHERS, _SCATTERS = {GATHER_SHARDS.default, GATHER_COPIES.default}, {SCATTER_SUMS.default}


def _differentiate(operator: Any, backward: Any) -> None:
    def setup(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        _, ctx.cards, ctx.dim = inputs

    def gradient(ctx: Any, tangent: Tensor) -> tuple[Tensor, None, None]:
        return (tangent if backward is None else backward(tangent, ctx.cards, ctx.dim)), None, None

    torch.library.register_autograd(operator.default, gradient, setup_context=setup)


for _forward, _backward in _BACKWARDS.items():
    _differentiate(_forward, _backward)
_differentiate(SUM_SHARDS, None)


def is_exchange(node: fx.Node) -> bool:
    """Whether the node stands for an exchange between the cards of a tensor-parallel group."""
    return node.target in _GATHERS or node.target in _SCATTERS or node.target == SUM_SHARDS.default


def exchange_seconds(node: fx.Node, ring: Ring) -> float:
    """Seconds of an exchange over a ring of cards."""
    (given,) = node.all_input_nodes
    if node.target == SUM_SHARDS.default:
        return ring.sum_seconds(storage_bytes(node.meta["val"]))
    whole = node if node.target in _GATHERS else given
    return ring.gather_seconds(storage_bytes(whole.meta["val"]))
