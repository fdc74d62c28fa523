"""Kinds of operators: casts, views, copies, elementwise ones; how they treat dtypes; which write over an operand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from passes.compat import define_operator, schema_of
from passes.graphs.node_facts import OPERATOR_OVERLOAD, arguments_of

DATA: Any = define_operator("data(Tensor(a) value) -> Tensor(a)", lambda value: value.data)
"""The attribute `data` of a tensor as an operator, so that a trace has a node for it. Where it is differentiated, it is
decomposed into what torch's tracers make of the attribute.

Unlike `detach`, the attribute has a version counter of its own: a write through it raises no error in the backward of
an operator that saved the tensor, which then computes with the written values."""

_CASTS = frozenset({"to", "_to_copy", "_autocast_to_reduced_precision", "_autocast_to_full_precision"})

_VIEWS = frozenset(
    {
        "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "lift_fresh", "mT",
        "movedim", "narrow", "numpy_T", "permute", "ravel", "reshape", "select", "slice", "split", "split_with_sizes",
        "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold",
        "unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as", "_reshape_alias", "_unsafe_view",
    }
)  # fmt: skip

_COPIES = frozenset(
    {
        "clone", "constant_pad_nd", "contiguous", "embedding", "flip", "gather", "index", "index_select",
        "lift_fresh_copy", "masked_select", "pad", "repeat", "repeat_interleave", "roll", "take", "take_along_dim",
        "tile", "tril", "triu", "_unsafe_index",
    }
)  # fmt: skip

PICKS = frozenset({"embedding", "gather", "index", "index_select", "take", "take_along_dim"})
"""Calls that pick elements by number, one of them perhaps many times, so that its gradient is a sum."""

# Their results are elements of their input, zeros or positions: exact in any dtype.
_SELECTS = frozenset(
    {
        "adaptive_max_pool1d", "adaptive_max_pool2d", "amax", "amin", "argmax", "argmin", "argsort", "max",
        "max_pool1d", "max_pool2d", "max_pool3d", "median", "min", "sort", "topk",
    }
)  # fmt: skip

# Composite operators that are elementwise, or promote their operands alike, though torch does not tag them so.
_POINTWISE = frozenset(
    {
        "add", "alpha_dropout", "cat", "concat", "div", "divide", "dropout", "feature_dropout", "glu", "hardswish",
        "hstack", "log_sigmoid", "masked_fill", "masked_fill_", "mul", "multiply", "native_dropout", "stack", "sub",
        "subtract", "vstack", "where",
    }
)  # fmt: skip

CAST_FIRST_ONLY = frozenset({"batch_norm", "native_batch_norm", "instance_norm"})
"""Operators whose first input alone is cast: kernels take it in 16 bits with parameters and statistics in fp32."""

_NEW = frozenset(
    {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")}
    | {f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")}
)

_FILLS = frozenset(
    {"fill", "fill_", "full", "full_like", "masked_fill", "masked_fill_", "new_full", "scalar_tensor", "where", "pad"}
)


def op_name(node: Node, namespaces: Collection[str] = ("aten",)) -> str:
    """Returns the name of a call's operator without overload, `layer_norm` for `aten.layer_norm.default`. Returns ""
    for operators of libraries that are not in `namespaces`, and for nodes that are no calls of operators."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OPERATOR_OVERLOAD) or target.namespace not in namespaces:
        return ""
    return str(target.overloadpacket.__name__)


def is_cast(node: Node) -> bool:
    """True for a call that may change its input's dtype, and besides that at most its device or layout."""
    return op_name(node) in _CASTS


def is_view(node: Node) -> bool:
    """True for a call whose result is a view of its first argument, or may be one."""
    return op_name(node) in _VIEWS or node.target is DATA


def moves_data(node: Node) -> bool:
    """True for a call that only rearranges, copies or picks elements of its first argument: exact in any dtype."""
    return is_view(node) or op_name(node) in _COPIES


def follows_input(node: Node) -> bool:
    """True for a call that rounds nothing in 16 bits: one of those that `moves_data` accepts, or one that selects
    elements of its first argument or their positions, as `max` and `sort` do."""
    return moves_data(node) or op_name(node) in _SELECTS


def dims_order(node: Node) -> list[int] | None:
    """Returns, for a call that only reorders dimensions, the dimension of its input that each one of its result is;
    None for any other call."""
    if op_name(node) not in ("permute", "transpose", "swapaxes", "swapdims", "t", "mT"):
        return None
    count, arguments = node.meta["val"].dim(), arguments_of(node)
    if op_name(node) == "permute":
        return [dim % count for dim in arguments["dims"]]
    order = list(range(count))
    if count > 1:
        swapped = [arguments[name] for name in ("dim0", "dim1", "axis0", "axis1") if name in arguments] or [-1, -2]
        one, other = (dim % count for dim in swapped)
        order[one], order[other] = other, one
    return order


def is_new(node: Node) -> bool:
    """True for a call that reads only the shape and dtype of its first argument: `zeros_like`, `new_ones`."""
    return op_name(node) in _NEW


def is_pointwise(node: Node) -> bool:
    """True for a call that works element by element and promotes its operands to a common dtype."""
    target: Any = node.target
    name = op_name(node)
    return bool(name) and (name in _POINTWISE or torch.Tag.pointwise in target.tags)


def broadcasts(node: Node) -> bool:
    """True for a call that works element by element on operands that are broadcast to the shape of its result."""
    return is_pointwise(node) and op_name(node).removesuffix("_") not in _NOT_BROADCAST


# Tagged as pointwise, or counted so, though they join or halve a dimension, draw numbers, or align an operand with
# another dimension than broadcasting does.
_NOT_BROADCAST = frozenset(
    {
        "alpha_dropout", "bucketize", "cat", "concat", "dropout", "feature_dropout", "glu", "hstack", "native_dropout",
        "prelu", "stack", "vstack",
    }
)  # fmt: skip


def promotes(node: Node) -> bool:
    """True if the kernel itself takes operands of different dtypes and computes in the wider."""
    target: Any = node.target
    name = op_name(node)
    return name in {"add", "sub", "mul", "div", "where", "cat", "stack"} or (
        bool(name) and torch.Tag.pointwise in target.tags and name not in {"lerp", "gelu", "prelu"}
    )


def mutated_arguments(node: Node) -> tuple[Node, ...]:
    """Returns the tensors among the arguments that the operator writes to, by its schema."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OPERATOR_OVERLOAD):
        return ()
    found = []
    for index, argument in enumerate(schema_of(target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, (tuple, list)) else [value]
        found += [written for written in values if isinstance(written, Node)]
    return tuple(found)


def fills_with(node: Node) -> tuple[tuple[int | str, float], ...]:
    """Returns the numbers with which a call may fill its result, each after its argument's position or keyword."""
    if op_name(node) not in _FILLS:
        return ()
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    return tuple((place, float(value)) for place, value in places if type(value) in (float, int))


aten = torch.ops.aten

# The operators that can write their result over an operand: same kernel, same bits, no new memory. They are those that
# are known to work, not all that look possible: many `out=` variants are generated ones that compute a new result and
# copy it, and not every kernel that is elementwise by name reads each element before it writes it. The gradients of
# softmax sum over a row before they write any of it, and then read each element where they write it, on CPU and CUDA.
_OVER_FIRST_BY_DEFAULT = (
    "relu", "addcmul", "addcdiv", "neg", "gelu", "silu", "sigmoid", "tanh", "exp", "expm1", "log", "log1p", "sqrt",
    "rsqrt", "reciprocal", "erf", "sin", "cos", "clamp", "clamp_min", "clamp_max", "hardtanh", "leaky_relu", "elu",
    "hardswish", "hardsigmoid", "mish",
)  # fmt: skip
_BACKWARDS = (
    "threshold", "gelu", "silu", "sigmoid", "tanh", "hardtanh", "leaky_relu", "elu", "softplus", "hardsigmoid",
)  # fmt: skip


_OVER_FIRST: Mapping[Any, Any] = {
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    **{
        getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
        for name in ("add", "sub", "mul", "div", "masked_fill")
        for overload in ("Tensor", "Scalar")
    },
    **{getattr(aten, name).default: getattr(aten, f"{name}_").default for name in _OVER_FIRST_BY_DEFAULT},
}

_OVER_ANY: Mapping[Any, tuple[Any, str]] = {
    **{
        getattr(packet, overload): (packet.out, "out")
        for packet, overload in (
            *((packet, "Tensor") for packet in (aten.add, aten.sub, aten.mul, aten.div)),
            *((packet, "default") for packet in (aten.maximum, aten.minimum, aten.addcmul, aten.addcdiv)),
            (aten._log_softmax_backward_data, "default"),
        )
    },
    aten.where.self: (aten.where.self_out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    **{(packet := getattr(aten, f"{name}_backward")).default: (packet.grad_input, "grad_input") for name in _BACKWARDS},
}


def inplace_variants(target: Any) -> Iterator[tuple[Any, str]]:
    """Yields the variants of an operator that write the result over an operand and are known to do so safely: each with
    the name of the argument that takes the operand, "" where it writes over its first argument."""
    if target in _OVER_FIRST:
        yield _OVER_FIRST[target], ""
    if target in _OVER_ANY:
        yield _OVER_ANY[target]


WITH_INPLACE_VARIANT = {**_OVER_FIRST, **_OVER_ANY}.keys()
"""Every operator that `inplace_variants` knows."""
OF_OUT: Mapping[Any, Any] = {variant: operator for operator, (variant, _) in _OVER_ANY.items()}
"""For each `out=` variant that `inplace_variants` yields, the operator that it is a variant of."""


# CUDA's autocast lists, by name of operator, copied from torch 2.13, `torch/include/ATen/autocast_mode.h`, with which a
# test compares them. FP32 has one more, `linalg_matrix_sqrth`, which torch 2.15 added outside of its lists.
LOWER_PRECISION = frozenset(
    {
        "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
        "conv_transpose3d", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
        "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
        "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
        "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    }
)  # fmt: skip

FP32 = frozenset(
    {
        "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
        "sinh", "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm",
        "nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
        "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
        "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
        "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d",
        "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
        "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
        "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "linalg_matrix_sqrth",
    }
)  # fmt: skip

FP32_SET_DTYPE = frozenset(
    {
        "prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum",
    }
)  # fmt: skip
"""Operators that compute in fp32 unless the caller names a dtype."""

PROMOTE = frozenset(
    {
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
        "scatter_add",
    }
)  # fmt: skip
"""`AT_FORALL_PROMOTE`: operators that compute in the widest dtype of their operands."""
