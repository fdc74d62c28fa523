"""The operators that can write their result over an operand: same kernel, same bits, no new memory.

The list has the variants that are known to work, not all that look possible: many `out=` variants are generated ones
that compute a new result and copy it, and not every kernel that is elementwise by name reads each element before it
writes it. The gradients of softmax sum over a row before they write any of it, and then read each element where they
write it, on CPU and CUDA.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten

_UNARY = (
    "neg", "gelu", "silu", "sigmoid", "tanh", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "erf",
    "sin", "cos", "clamp", "clamp_min", "clamp_max", "hardtanh", "leaky_relu", "elu", "hardswish", "hardsigmoid",
    "mish",
)  # fmt: skip
_BACKWARDS = (
    "threshold", "gelu", "silu", "sigmoid", "tanh", "hardtanh", "leaky_relu", "elu", "softplus", "hardsigmoid",
)  # fmt: skip


@dataclass(frozen=True)
class InplaceVariant:
    """The variant of an operator that writes its result over an operand."""

    target: Any
    out: str = ""
    """The name of the argument that takes the operand; empty where the operator writes over its first."""


_OVER_FIRST: Mapping[Any, Any] = {
    aten.relu.default: aten.relu_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.add.Scalar: aten.add_.Scalar,
    aten.sub.Scalar: aten.sub_.Scalar,
    aten.mul.Scalar: aten.mul_.Scalar,
    aten.div.Scalar: aten.div_.Scalar,
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.addcmul.default: aten.addcmul_.default,
    aten.addcdiv.default: aten.addcdiv_.default,
    **{getattr(aten, name).default: getattr(aten, f"{name}_").default for name in _UNARY},
}

_OVER_ANY: Mapping[Any, InplaceVariant] = {
    aten.add.Tensor: InplaceVariant(aten.add.out, "out"),
    aten.sub.Tensor: InplaceVariant(aten.sub.out, "out"),
    aten.mul.Tensor: InplaceVariant(aten.mul.out, "out"),
    aten.div.Tensor: InplaceVariant(aten.div.out, "out"),
    aten.where.self: InplaceVariant(aten.where.self_out, "out"),
    aten.maximum.default: InplaceVariant(aten.maximum.out, "out"),
    aten.minimum.default: InplaceVariant(aten.minimum.out, "out"),
    aten.addcmul.default: InplaceVariant(aten.addcmul.out, "out"),
    aten.addcdiv.default: InplaceVariant(aten.addcdiv.out, "out"),
    aten._softmax_backward_data.default: InplaceVariant(aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax_backward_data.default: InplaceVariant(aten._log_softmax_backward_data.out, "out"),
    **{
        (packet := getattr(aten, f"{name}_backward")).default: InplaceVariant(packet.grad_input, "grad_input")
        for name in _BACKWARDS
    },
}


def inplace_variants(target: Any) -> Iterator[InplaceVariant]:
    """Yields the variants by which an operator may write over an operand; none for an operator that is not listed."""
    if target in _OVER_FIRST:
        yield InplaceVariant(_OVER_FIRST[target])
    if target in _OVER_ANY:
        yield _OVER_ANY[target]


def known_targets() -> tuple[Any, ...]:
    """Returns every operator that `inplace_variants` knows."""
    return tuple(dict.fromkeys((*_OVER_FIRST, *_OVER_ANY)))


def out_of_place(target: Any) -> Any:
    """Returns the operator that an `out=` variant which `inplace_variants` yields is a variant of, or None."""
    return _OF_OUT.get(target)


_OF_OUT: Mapping[Any, Any] = {variant.target: operator for operator, variant in _OVER_ANY.items()}
