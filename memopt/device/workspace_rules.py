"""Building blocks of the rules for workspaces, and the rules that hold on every device; all give bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from memopt.compat.operators import schema_of
from memopt.device.op_call import OpCall, TensorSpec
from passes.ops.fp8_formats import E8M0
from passes.ops.linear_rows import chunk_rows

Rule = Callable[[OpCall], int]
AnyRule = TypeVar("AnyRule", bound=Callable[..., int])

KB, MB = 1024, 1024**2
MASKS = (torch.bool, torch.uint8)
"""The dtypes of indices that are masks."""
SCALARS = 64
"""Bytes of Python numbers that operators wrap in tensors."""


def for_each(names: str, rule: AnyRule) -> dict[str, AnyRule]:
    """A dict with the same rule for each operator in `names`, one string of names separated by spaces."""
    return dict.fromkeys(names.split(), rule)


def first(call: OpCall) -> TensorSpec:
    return call.inputs[0]


def input_bytes(call: OpCall) -> int:
    return sum(spec.dense_bytes for spec in call.inputs)


def output_bytes(call: OpCall) -> int:
    return sum(spec.dense_bytes for spec in call.outputs)


def all_bytes(call: OpCall) -> int:
    return input_bytes(call) + output_bytes(call)


def copies(call: OpCall) -> int:
    """Workspace bytes of kernels that need contiguous inputs: copies of those that are not."""
    return sum(spec.dense_bytes for spec in call.inputs if not spec.contiguous)


def strided_rows(call: OpCall) -> int:
    """Workspace bytes of kernels that need each row contiguous: copies of the inputs whose last dimension has gaps."""
    return sum(spec.dense_bytes for spec in call.inputs if spec.size and spec.size[-1] > 1 and spec.stride[-1] != 1)


def one_input(call: OpCall) -> int:
    return first(call).dense_bytes + SCALARS


def nothing(call: OpCall) -> int:
    return 0


def loss(call: OpCall) -> int:
    """Workspace bytes of a loss: its value for each element before the mean, in fp32 where the input has 16 bits. Some
    kernels reduce in place, so that this buffer stays allocated as the storage of the scalar result."""
    spec = max(call.inputs, key=lambda s: s.numel)
    wide = 4 * spec.numel if spec.dtype.itemsize < 4 else 0
    return 2 * spec.dense_bytes + wide + copies(call) + SCALARS


def index(call: OpCall) -> int:
    """Workspace bytes of indexing. A mask takes, for each of its elements, one int64 coordinate per dimension, but at
    least two coordinates. An int64 index that is not contiguous is copied. An int32 index is copied as int64, in the
    shape to which all indices are broadcast."""
    indices = [spec for spec in call.argument(1, "indices") if spec is not None]
    masks = [spec for spec in indices if spec.dtype in MASKS]
    copied = sum(spec.numel * 8 for spec in indices if spec.dtype == torch.int64 and not spec.contiguous)
    converted = 8 * broadcast_numel(indices) * sum(spec.dtype == torch.int32 for spec in indices)
    return sum(spec.numel * 8 * max(2, len(spec.size)) for spec in masks) + copied + converted


def broadcast_numel(indices: Sequence[TensorSpec]) -> int:
    """The number of elements of index tensors once they are broadcast together; an upper bound with masks."""
    try:
        return math.prod(torch.broadcast_shapes(*(spec.size for spec in indices)))  # type: ignore[no-untyped-call]
    except RuntimeError:  # the coordinates of a mask's elements are broadcast, not the mask
        return max(spec.numel for spec in indices)


def wide_index(call: OpCall) -> int:
    """Workspace bytes of int64 copies of int32 indices."""
    return 8 * sum(spec.numel for spec in call.inputs if spec.dtype == torch.int32)


def by_counts(call: OpCall) -> int:
    """Workspace bytes of `scatter_reduce` and `index_reduce`. A mean takes the count of values in each sum, a tensor of
    ones to count them, and a mask of the empty sums. `index_reduce` always starts from a copy."""
    counts = call.argument(4, "reduce") == "mean" or rule_name(call) == "index_reduce"
    return wide_index(call) + copies(call) + (all_bytes(call) + call.outputs[0].numel + SCALARS if counts else 0)


def chunked_loss(call: OpCall) -> int:
    """Workspace bytes of the chunked cross entropy: a chunk of logits in fp32 (with one more copy each for a softcap,
    for label smoothing with class weights and for fp16 inputs) and in 16 bits; the layer's weight in the dtype of its
    input; the sums of its gradient in fp32; some numbers for each row."""
    hidden, weight = call.inputs[:2]
    tokens, width = hidden.size
    rows = min(tokens, call.argument(10) or chunk_rows(tokens, width))
    narrow, wide = hidden.dtype.itemsize, max(4, hidden.dtype.itemsize)
    weighted = call.argument(7) and call.argument(4)
    copies = 1 + bool(call.argument(9)) + bool(weighted) + (hidden.dtype == torch.float16)
    logits = rows * weight.size[0] * (wide * copies + (narrow if narrow < wide else 0))
    cast = weight.numel * narrow if weight.dtype != hidden.dtype else 0
    of_weight = call.outputs[-2].numel  # in both operators; smaller than the weight where it is not computed
    sums = weight.numel * wide if of_weight == weight.numel and call.outputs[-2].dtype.itemsize < wide else 0
    return logits + cast + sums + 40 * tokens + 3 * rows * width * wide + KB


def linear_rows(call: OpCall) -> int:
    """Upper bound on the workspace bytes of `memopt::linear_rows` or its backward. For a chunk of rows in fp32: the
    logits, with 8 more classes for each layer as padding, and as many bytes again for each value that the operator's
    argument `program` computes from them; twice these bytes in the backward. In addition: each layer's weight in the
    dtype of its input, the sums of its gradient in fp32, and copies of all operands and results."""
    backward = rule_name(call) == "linear_rows_backward"
    hidden, weights = call.args[backward : backward + 2]
    program, chunk = call.argument(6 + backward), call.argument(7 + backward)
    tokens, width = hidden[0].size
    rows = min(tokens, chunk or chunk_rows(tokens, width))
    wide = max(4, hidden[0].dtype.itemsize)
    values = (program.count(" = ") + 4) * (1 + backward)
    classes = sum(weight.size[0] + 8 for weight in weights)
    layers = sum(2 * wide * (weight.numel + 8 * width) for weight in weights)
    others = sum(spec.dense_bytes for spec in call.inputs) + sum(spec.dense_bytes for spec in call.outputs)
    return values * rows * classes * wide + layers + others + KB


def class_vectors(call: OpCall) -> int:
    """Workspace bytes of a chunked cross entropy for vectors with one value per class: bias, class weights, their casts
    and sums."""
    hidden, weight = call.inputs[:2]
    return 4 * weight.size[0] * max(4, hidden.dtype.itemsize)


def fp8_scales(call: OpCall) -> int:
    """Workspace bytes of the scales of an 8-bit tensor and of the values that they are computed from. There is one
    scale for all elements, for each 128, or for each 32; the last kind is rounded to powers of two in several steps."""
    rounded = any(spec.dtype == E8M0 for spec in (*call.inputs, *call.outputs))
    return (40 * (first(call).numel // 32) if rounded else 16 * (first(call).numel // 64)) + 2 * KB


def unpacked_weight(call: OpCall) -> int:
    """Upper bound on the workspace bytes of a product with a 4-bit weight of bitsandbytes: the weight in the dtype of
    the input, and its scales in fp32, twice where they are quantised too."""
    scales = sum(spec.numel for spec in call.inputs[2:])
    return math.prod(call.argument(2)) * first(call).dtype.itemsize + 8 * scales + copies(call) + KB


def gaps(call: OpCall) -> int:
    """Workspace bytes of copies of the inputs whose elements do not fill one range of memory."""
    return sum(spec.dense_bytes for spec in call.inputs if not spec.dense)


def sparse_copies(call: OpCall) -> int:
    """Workspace bytes of a conversion to a sparse tensor: its indices twice, and its values, those of 16 bits in fp32
    too."""
    spec = first(call)
    return spec.numel * (16 * max(2, len(spec.size)) + max(6, spec.dtype.itemsize))


MAKE_CONTIGUOUS = (
    "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices avg_pool2d avg_pool3d "
    "max_pool3d_with_indices_backward avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward grid_sampler_2d "
    "grid_sampler_2d_backward reflection_pad2d reflection_pad2d_backward replication_pad2d "
    "replication_pad2d_backward channel_shuffle pixel_shuffle pixel_unshuffle upsample_nearest2d_backward "
    "upsample_bilinear2d_backward upsample_bicubic2d_backward col2im log_sigmoid_forward rrelu_with_noise "
    "masked_scatter index_select nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward "
    "max min aminmax argmax argmin bucketize _log_softmax_backward_data"
)
"""Operators whose kernels copy inputs with gaps; those of the CPU copy inputs that are dense but transposed, too."""

COMMON: dict[str, Rule] = {
    **for_each("linear_rows linear_rows_backward", linear_rows),
    **for_each(
        "linear_cross_entropy_with_gradients linear_cross_entropy_weight_gradient",
        lambda call: chunked_loss(call) + class_vectors(call),
    ),
    "fp8_delayed_scale": lambda call: 4 * KB,
    **for_each(  # the first two are of passes.ops.offload_ops
        "copy_out copy_back clone copy _to_copy convert_element_type empty_like full_like zeros_like ones_like "
        "rand_like randn_like "
        "new_zeros new_full new_empty bernoulli arange cat stack constant_pad_nd slice_backward select_backward "
        "as_strided flip slice_scatter select_scatter diag_embed where masked_fill "
        "amax amin dot vdot mv cummax cummin "
        "mse_loss_backward smooth_l1_loss_backward huber_loss_backward elu_backward glu glu_backward _prelu_kernel "
        "_prelu_kernel_backward log_sigmoid_backward softplus_backward hardswish "
        "hardswish_backward mish_backward leaky_relu_backward rrelu_with_noise_backward "
        "_unsafe_view _reshape_alias",
        nothing,
    ),
    **for_each(MAKE_CONTIGUOUS, gaps),
    **for_each("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits", loss),
    **for_each("logsumexp norm renorm", lambda call: 2 * one_input(call) + KB),
    **for_each("median isinf im2col", one_input),
    **for_each("index _unsafe_index", index),
    **for_each("repeat binary_cross_entropy_backward unfold_backward", lambda call: 2 * KB),
    **for_each("tril triu", copies),
    "roll": lambda call: (max(1, len(call.argument(2) or ())) - 1) * first(call).dense_bytes + copies(call),
    "ldexp": output_bytes,
    "mvlgamma": lambda call: (1 + call.argument(1)) * one_input(call),
    **for_each("scatter_reduce index_reduce", by_counts),
    "masked_select": lambda call: 8 * broadcast_numel(call.inputs) * max(2, *(len(s.size) for s in call.inputs)),
    "_fft_c2r": lambda call: all_bytes(call) + input_bytes(call),
    **for_each(
        "linalg_eig _linalg_eigh linalg_lstsq linalg_pinv _linalg_det _linalg_slogdet",
        lambda call: 4 * all_bytes(call) + 4 * KB,
    ),
    "linalg_matrix_exp": lambda call: 16 * max(4, first(call).dtype.itemsize) * first(call).numel + KB,
    "nonzero": lambda call: 16 * first(call).numel,
    "_to_sparse": sparse_copies,
    **for_each("gemm_4bit gemv_4bit", unpacked_weight),
    **for_each("dequantize_4bit dequantize_blockwise", lambda call: 8 * call.inputs[1].numel + copies(call) + KB),
    "int8_scaled_mm": lambda call: 4 * call.outputs[0].numel + all_bytes(call),
    "int8_mixed_scaled_mm": lambda call: 8 * call.outputs[0].numel + 2 * all_bytes(call),
    "nonzero_static": lambda call: 8 * max(2, len(first(call).size)) * first(call).numel,
    **for_each("_unique _unique2", lambda call: all_bytes(call) + 32 * first(call).numel + KB),
    **for_each("any all", lambda call: 0 if first(call).dtype == torch.bool else first(call).numel + SCALARS),
    "count_nonzero": lambda call: 9 * first(call).numel + output_bytes(call) + KB,
    **for_each("allclose _euclidean_dist", lambda call: 3 * all_bytes(call)),
    "dist": lambda call: 2 * broadcast_numel(call.inputs) * first(call).dtype.itemsize,
    "kthvalue": lambda call: 2 * one_input(call) + 8 * first(call).numel,
    "masked_scatter_backward": lambda call: 24 * broadcast_numel(call.inputs[:2]),
    "multinomial": lambda call: 4 * one_input(call) + 16 * KB,
    "isin": lambda call: 24 * sum(spec.numel for spec in call.inputs),
}


def rule_name(call: OpCall) -> str:
    """The name of an operator in the rules: without namespace, overload, and the final `_` of in-place operators."""
    return call.name.removesuffix("_")


def by_rules(call: OpCall, rules: Mapping[str, Rule], *, pointwise: Rule = nothing, reduction: Rule = all_bytes) -> int:
    """The workspace bytes of a call by `rules`, which are for a kind of device, or else by those that hold on every
    device. Without a rule, operators on lists of tensors and those that return an alias hold nothing; pointwise ones
    and reductions hold what `pointwise` and `reduction` say; all others are assumed to copy all their tensors once."""
    name = rule_name(call)
    rule = rules.get(name) or COMMON.get(name)
    if rule is not None:
        return rule(call)
    if name.startswith("_foreach") or _returns_alias(call) or not call.inputs:
        return 0
    if torch.Tag.pointwise in call.op.tags:
        return pointwise(call)
    return (reduction if torch.Tag.reduction in call.op.tags else all_bytes)(call)


def _returns_alias(call: OpCall) -> bool:
    returns = schema_of(call.op).returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)
