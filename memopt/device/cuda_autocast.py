"""CUDA's autocast applied to CPU tensors: plans for a GPU that is not present need the casts that it would make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.compat.dispatch import composite_kernel, cuda_autocast_names, without_autocast
from memopt.compat.operators import schema_of
from memopt.compat.pytree import tree_leaves, tree_map
from passes.graphs.op_kinds import FP32, FP32_SET_DTYPE, LOWER_PRECISION, PROMOTE

# Composite operators that call an operator of these lists; the others only view or copy.
_REACH_A_LIST = frozenset(
    {
        "cross_entropy_loss", "nll_loss_nd", "ctc_loss", "std", "var", "norm", "nuclear_norm", "frobenius_norm",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward",
    }
)  # fmt: skip


def cuda_autocast_kernel(operator: Any, low: torch.dtype) -> Callable[..., Any] | None:
    """A function that computes an operator as autocast with the dtype `low` does on CUDA: casts and then the operator,
    or the operators that it decomposes into. None where autocast leaves the operator as it is, or where it is not an
    ATen operator."""
    name = operator.overloadpacket.__name__
    if operator.namespace != "aten":
        return None
    if name in LOWER_PRECISION:
        return _casting(operator, lambda value: value.to(low))
    if name in FP32 & cuda_autocast_names():
        return _casting(operator, lambda value: value.to(torch.float32))
    if name in FP32_SET_DTYPE and _takes_dtype(operator):
        return _with_dtype(operator)
    if name in PROMOTE:
        return _promoting(operator)
    return composite_kernel(operator) if name in _REACH_A_LIST else None


def _casting(operator: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """The operator with `cast` applied to each floating-point tensor argument except fp64 ones."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            args, kwargs = tree_map(lambda value: cast(value) if _eligible(value) else value, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _with_dtype(operator: Any) -> Callable[..., Any]:
    """The operator with `dtype=torch.float32` unless the caller gives a dtype."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in schema_of(operator).arguments]
        given = kwargs.get("dtype") or (args[names.index("dtype")] if names.index("dtype") < len(args) else None)
        with without_autocast():
            if given is None and _eligible(args[0]):
                kwargs = {**kwargs, "dtype": torch.float32}
                args = args[: names.index("dtype")]
            return operator(*args, **kwargs)

    return kernel


def _promoting(operator: Any) -> Callable[..., Any]:
    """The operator with its tensor arguments cast to fp32 where one of them is in fp32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        types = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _eligible(leaf)}
        if torch.float32 not in types:
            with without_autocast():
                return operator(*args, **kwargs)
        return _casting(operator, lambda value: value.to(torch.float32))(*args, **kwargs)

    return kernel


def _takes_dtype(operator: Any) -> bool:
    return any(argument.name == "dtype" for argument in schema_of(operator).arguments)


def _eligible(value: Any) -> bool:
    """Whether autocast casts a value: a floating-point tensor that is not fp64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
