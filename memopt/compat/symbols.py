"""Symbolic sizes: their values, bounds and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, rebind_unbacked

from memopt.compat.fakes import FakeTensorMode

__all__ = ["data_symbols_of", "known_sizes", "plain_symbol", "rebind_data_sizes", "upper_bound"]

_known_sizes: ContextVar[Mapping[str, int] | None] = ContextVar("known_sizes", default=None)


@contextmanager
def known_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Values of data-dependent symbols, by name, that `upper_bound` counts with inside the block."""
    token = _known_sizes.set(sizes)
    try:
        yield
    finally:
        _known_sizes.reset(token)


def upper_bound(size: torch.SymInt) -> int:
    """The largest value that a symbolic size may take: its hint where it has one, else by the sizes known here, else
    the bound of its data."""
    node: Any = size.node
    if node.has_hint():
        return int(node.hint)
    known = _known_sizes.get() or {}
    values = {s: known[s.name] for s in node.expr.free_symbols if s.name in known}
    expression = sympy.sympify(node.expr.xreplace(values))
    bound = node.shape_env.bound_sympy(expression).upper
    if not bound.is_Integer:
        mend = f"call torch._check({size} <= …) in the model"
        raise ValueError(f"the size {size} depends on data and has no bound; {mend}")
    return int(bound)


def data_symbols_of(value: Any) -> set[str]:
    """Names of the symbols in a node's value whose size only data tell."""
    if isinstance(value, (tuple, list)):
        return set().union(*map(data_symbols_of, value))
    return {symbol.name for symbol in free_unbacked_symbols(value)} if isinstance(value, _SYMBOLIC) else set()


_SYMBOLIC = (torch.Tensor, torch.SymInt, torch.SymFloat)


def plain_symbol(size: int | torch.SymInt) -> str | None:
    """The symbol's name if a size is one symbol and no expression of it."""
    if isinstance(size, int):
        return None
    expression: Any = size.node.expr
    return expression.name if expression.is_symbol else None


def rebind_data_sizes(mode: FakeTensorMode, node: fx.Node, result: Any) -> None:
    """Have the data-dependent symbols of a repeated run stand for those of the first."""
    rebind_unbacked(mode.shape_env, node, result)
