"""Operators: their types, schemas and overload names."""

from __future__ import annotations

from typing import Any

from torch._ops import HigherOrderOperator, OpOverload

from passes.compat import private

PRIVATE_NAMES = (
    *private("torch._ops", "OpOverload", "HigherOrderOperator"),
    *private("torch._ops", "OpOverload._schema", "OpOverload._overloadname", needed=False),
)

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "makes_unknown_bytes",
    "overload_name",
    "schema_of",
    "takes_unknown_bytes",
]


def schema_of(operator: Any) -> Any:
    """The schema of an operator overload: its name, arguments and returns, and whether it mutates an argument."""
    return operator._schema


def makes_unknown_bytes(operator: Any) -> bool:
    """Whether an operator's fake results are smaller than its kernel's: recurrent layers of oneDNN, cuDNN and MIOpen
    save for their backward what the library asks for, which fakes give as no bytes."""
    return schema_of(operator).name in _OF_LIBRARIES


def takes_unknown_bytes(operator: Any) -> bool:
    """Whether an operator is the backward of one that `makes_unknown_bytes`: given fewer, it reads beyond them."""
    return schema_of(operator).name.removesuffix("_backward") in _OF_LIBRARIES and not makes_unknown_bytes(operator)


def overload_name(operator: OpOverload) -> str:
    """The overload's name within its packet: "default", "Tensor", "out"."""
    return operator._overloadname


_OF_LIBRARIES = frozenset(("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"))
