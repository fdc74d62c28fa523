"""Floating-point operations of operator calls, by the formulas of torch's flop counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry

from memopt.compat.operators import OpOverload, schema_of

_NOT_IN_FORMULAS = ("out", "out_dtype")
"""Arguments that formulas do not take: as a positional argument, the dtype of a matmul's result would be taken for its
shape."""


def flop_formula(op: Any) -> Callable[..., Any] | None:
    """A function of the arguments of a call of `op`, and of its result as `out_val`, that gives the call's operations,
    two for a multiply-add; None for what has no formula.

    Tensors may be on "meta" or fake; symbolic sizes give a symbolic number.
    """
    formula = flop_registry.get(op.overloadpacket) if isinstance(op, OpOverload) else None
    if formula is None:
        return None
    declared = schema_of(op).arguments

    def operations(*args: Any, out_val: Any, **kwargs: Any) -> Any:
        given = zip(args, declared, strict=False)
        shapes = [value for value, argument in given if argument.name not in _NOT_IN_FORMULAS]
        named = {name: value for name, value in kwargs.items() if name not in _NOT_IN_FORMULAS}
        return formula(*shapes, **named, out_val=out_val)

    return operations
