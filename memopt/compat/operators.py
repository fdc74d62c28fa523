"""Operators: their types, schemas and overload names.

Private names, in torch 2.11 to 2.15: `torch._ops.OpOverload`, `torch._ops.HigherOrderOperator`,
`OpOverload._schema`, `OpOverload._overloadname`.
"""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["HigherOrderOperator", "OpOverload", "overload_name", "schema_of"]


def schema_of(operator: Any) -> Any:
    """The schema of an operator overload: its name, arguments and returns, and whether it mutates an argument."""
    return operator._schema


def overload_name(operator: OpOverload) -> str:
    """The overload's name within its packet: "default", "Tensor", "out"."""
    return operator._overloadname
