"""Workspace by rule, for ops that are not run for their price: upper bounds read off torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from memopt.pricing.op_call import OpCall, TensorSpec

Rule = Callable[[OpCall], int]

KB, MB = 1024, 1024**2

CUDA_PERSISTENT_WORKSPACE_BYTES = 32 * MB + 32 * MB
"""What cuBLAS and cuBLASLt take from the allocator at their first call, and keep: once a step, not once an op.

Hopper's default; others take 8 MB each (`CUBLAS_WORKSPACE_CONFIG`, `CUBLASLT_WORKSPACE_SIZE`).
"""


def estimate_workspace(call: OpCall, device_type: str) -> int:
    """Temporary bytes that the kernel of a call holds at most, beyond inputs and outputs.

    `device_type` is "cuda", or anything else for the CPU. An op that no rule knows is taken to copy its largest
    tensor once; views and pointwise ops hold nothing (on the CPU: the arguments whose dtype must change).
    """
    cuda = device_type == "cuda"
    name = call.op._schema.name.split("::")[-1].removesuffix("_")
    rule = (_CUDA if cuda else _CPU).get(name) or _COMMON.get(name)
    if rule is not None:
        return rule(call)
    if name.startswith("_foreach") or _returns_alias(call) or not call.inputs:
        return 0
    if torch.Tag.pointwise in call.op.tags:
        return 0 if cuda else _promoted(call)
    if torch.Tag.reduction in call.op.tags:
        return 4 * MB if cuda else _converted(call)
    return max(spec.dense_bytes for spec in (*call.inputs, *call.outputs))


def _returns_alias(call: OpCall) -> bool:
    returns = call.op._schema.returns
    return bool(returns) and all(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _first(call: OpCall) -> TensorSpec:
    return call.inputs[0]


def _input_bytes(call: OpCall) -> int:
    return sum(spec.dense_bytes for spec in call.inputs)


def _output_bytes(call: OpCall) -> int:
    return sum(spec.dense_bytes for spec in call.outputs)


def _all_bytes(call: OpCall) -> int:
    return _input_bytes(call) + _output_bytes(call)


def _copies(call: OpCall) -> int:
    """Kernels that take contiguous tensors only."""
    return sum(spec.dense_bytes for spec in call.inputs if not spec.contiguous)


def _promoted(call: OpCall) -> int:
    """The CPU's iterator copies every argument whose dtype is not the common one; CUDA converts as it reads."""
    values = [s for s in call.inputs if s.dtype != torch.bool] if "where" in str(call.op) else list(call.inputs)
    common = values[0].dtype
    for spec in values[1:]:
        common = torch.promote_types(common, spec.dtype)
    copies = sum(spec.numel * common.itemsize for spec in values if spec.dtype != common)
    results = sum(spec.numel * common.itemsize for spec in call.outputs if spec.dtype not in (common, torch.bool))
    return copies + results


def _converted(call: OpCall) -> int:
    """Reductions and scans in another dtype than their input's: integers in int64, 16 bits in fp32."""
    spec = _first(call)
    accumulator = 4 if spec.dtype.is_floating_point else 8
    outputs = sum(out.numel for out in call.outputs)
    if spec.dtype.itemsize >= accumulator and spec.dtype == call.outputs[0].dtype:
        return 64
    return (spec.numel + outputs) * max(accumulator, call.outputs[0].dtype.itemsize) + 64


def _one_input(call: OpCall) -> int:
    return _first(call).dense_bytes + 64


def _nothing(call: OpCall) -> int:
    return 0


def _cpu_softmax(call: OpCall) -> int:
    """The safe form asks which rows are masked whole: a mask of bools, and two of a row each."""
    numel = _first(call).numel
    return numel + 4 * numel // max(1, _first(call).size[-1]) + _copies(call) + 64


def _threads() -> int:
    return torch.get_num_threads()


def _cpu_layer_norm_backward(call: OpCall) -> int:
    row = math.prod(call.argument(2)) if isinstance(call.argument(2), tuple) else _first(call).size[-1]
    return 2 * _threads() * row * 4 + _copies(call)


def _cpu_group_norm(call: OpCall) -> int:
    samples, channels = _first(call).size[:2]
    return 4 * samples * channels * 4 + _threads() * channels * 8 + _copies(call)


def _cpu_flash(call: OpCall) -> int:
    """Scores of a block of 256 queries by 512 keys, a thread; in 16 bits keys and values are packed anew."""
    query = _first(call)
    keys = max(spec.size[-2] for spec in call.inputs[:3])
    rows, columns = min(256, query.size[-2]), min(512, keys)
    each = rows * columns + 2 * rows + rows * query.size[-1]
    packed = 0 if query.dtype.itemsize >= 4 else 2 * sum(s.dense_bytes for s in call.inputs[1:3]) + 64 * KB
    return _threads() * each * (4 if packed == 0 else 6) + packed


def _cpu_flash_backward(call: OpCall) -> int:
    query, key = call.inputs[1:3]
    rows, columns = min(256, query.size[-2]), min(512, key.size[-2])
    return 2 * _threads() * (2 * rows * columns + 2 * rows) * 4 + 8 * KB + _copies(call) // 4


def _cpu_convolution(call: OpCall) -> int:
    """oneDNN keeps its own layout of all arguments; what it does not take (fp64) becomes columns for a matmul."""
    weight = call.inputs[-1] if call.argument(2) is None else call.inputs[1]
    spatial = math.prod(call.outputs[0].size[2:])
    columns = call.inputs[0].size[0] * math.prod(weight.size[1:]) * spatial * 8
    return 2 * _all_bytes(call) + 64 * KB + (columns if _first(call).dtype == torch.float64 else 0)


def _cpu_matmul(call: OpCall) -> int:
    """oneDNN's 16-bit matmuls reorder what is transposed."""
    return 0 if _first(call).dtype.itemsize >= 4 else _input_bytes(call) + 256 * KB


def _cpu_batch_norm(call: OpCall) -> int:
    return 2 * _first(call).size[1] * 8 + _copies(call)


def _cpu_scatter(call: OpCall) -> int:
    """In 16 bits they go through fp32; an index that is expanded is copied."""
    narrow = _first(call).dtype.itemsize < 4
    return (4 * max(spec.numel for spec in call.inputs) + 64 * KB if narrow else 0) + _copies(call)


def _cpu_resize(call: OpCall) -> int:
    return _all_bytes(call) + 64 * KB


def _loss(call: OpCall) -> int:
    """The elementwise loss, in fp32 where 16 bits are averaged; some keep it behind the result's single number."""
    spec = max(call.inputs, key=lambda s: s.numel)
    return 2 * spec.dense_bytes + (4 * spec.numel if spec.dtype.itemsize < 4 else 0) + 64


def _index(call: OpCall) -> int:
    """A mask becomes the int64 coordinates of its elements, found twice over; broadcast indices are expanded."""
    masks = [spec for spec in call.inputs[1:] if spec.dtype in (torch.bool, torch.uint8)]
    expanded = sum(spec.numel * 8 for spec in call.inputs[1:] if spec.dtype == torch.int64 and not spec.contiguous)
    return sum(spec.numel * 8 * max(2, len(spec.size)) for spec in masks) + expanded


def _cuda_flash_backward(call: OpCall) -> int:
    """FlashAttention-2: fp32 dQ, padded to 128 rows and 32 columns, its row sums, dK and dV of each query head."""
    query, key = call.inputs[1:3]
    batch, heads = query.size[0], max(query.size[1], key.size[1])
    rows = -(-query.size[2] // 128) * 128
    gradient = batch * heads * rows * (-(-query.size[3] // 32) * 32 + 1) * 4
    grouped = 2 * batch * heads * key.size[2] * key.size[3] * key.dtype.itemsize if key.size[1] < heads else 0
    return gradient + grouped + _copies(call)


def _cuda_flash(call: OpCall) -> int:
    """Few query blocks are split along the keys, each part with an fp32 output, until the 132 multiprocessors work."""
    batch, heads, rows, width = _first(call).size
    keys = call.inputs[1].size[2]
    blocks = batch * heads * -(-rows // 64)
    parts = min(-(-keys // 64), 128, 264 // max(1, blocks))
    return parts * batch * heads * rows * (width + 1) * 4 if parts > 1 else 0


def _cuda_embedding_backward(call: OpCall) -> int:
    """Indices are sorted with their positions (int64, double buffers), then summed by parts of ten rows in fp32."""
    gradient, indices = call.inputs[:2]
    rows = call.argument(2)
    if not isinstance(rows, int):
        rows = indices.numel
    parts = indices.numel // 10 + min(indices.numel, rows)
    return 6 * 8 * indices.numel + parts * -(-gradient.size[-1] // 32) * 32 * 4 + _copies(call)


def _cuda_index_put(call: OpCall) -> int:
    """Linear indices, sorted with their positions; values that are broadcast are expanded."""
    indexed = max((spec.numel for spec in call.inputs[1:-1]), default=0)
    return 6 * 8 * indexed + call.inputs[-1].dense_bytes + _index(call)


def _cuda_layer_norm_backward(call: OpCall) -> int:
    row = call.inputs[-1].size[-1]
    return 2 * 512 * row * 4 + _copies(call)


def _cuda_group_norm(call: OpCall) -> int:
    samples, channels = _first(call).size[:2]
    return 6 * samples * channels * 4 + _copies(call)


def _cuda_batch_norm(call: OpCall) -> int:
    return 2 * 128 * _first(call).size[1] * 4 + _copies(call)


def _cuda_convolution(call: OpCall) -> int:
    """cuDNN: both layouts of every tensor, and its heuristics' workspace (a guess: it is chosen when it runs)."""
    return _all_bytes(call) + 32 * MB


def _cuda_sort(call: OpCall) -> int:
    spec = _first(call)
    return 2 * (spec.dense_bytes + 8 * spec.numel) + MB


def _cuda_scan(call: OpCall) -> int:
    """Converted to the result's dtype first."""
    return (_output_bytes(call) if _first(call).dtype != call.outputs[0].dtype else 0) + MB


def _names(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_COMMON: dict[str, Rule] = {
    **_names(
        "clone copy _to_copy convert_element_type empty_like full_like zeros_like ones_like rand_like randn_like bernoulli "
        "cat stack constant_pad_nd slice_backward select_backward as_strided slice_scatter select_scatter tril triu roll "
        "flip repeat where masked_fill index_select nll_loss_forward nll_loss_backward nll_loss2d_forward "
        "nll_loss2d_backward _softmax_backward_data _log_softmax_backward_data max_pool2d_with_indices "
        "max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d "
        "_adaptive_avg_pool2d_backward pixel_shuffle pixel_unshuffle upsample_nearest2d_backward "
        "upsample_bilinear2d_backward amax amin argmax argmin max min any all dot mv _unsafe_view",
        _nothing,
    ),
    **_names("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits", _loss),
    **_names("logsumexp norm renorm var var_mean std", lambda call: 2 * _one_input(call)),
    **_names("index _unsafe_index", _index),
    "nonzero": lambda call: 16 * _first(call).numel,
    "kthvalue": lambda call: 2 * _one_input(call) + 8 * _first(call).numel,
    "masked_scatter_backward": lambda call: 24 * call.inputs[1].numel,
    "multinomial": lambda call: 4 * _one_input(call) + 16 * KB,
    "im2col": _one_input,
    "_euclidean_dist": lambda call: 3 * _all_bytes(call),
    "isin": lambda call: 9 * _first(call).numel * max(1, call.inputs[1].numel),
}

_CPU: dict[str, Rule] = {
    "native_dropout": _one_input,
    "native_dropout_backward": _one_input,
    **_names("_softmax _log_softmax _safe_softmax _fused_softmax", _cpu_softmax),
    **_names("native_layer_norm rms_norm _fused_rms_norm embedding gelu gelu_backward", _copies),
    **_names("native_layer_norm_backward _fused_rms_norm_backward", _cpu_layer_norm_backward),
    **_names("native_group_norm native_group_norm_backward", _cpu_group_norm),
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_flash_backward,
    **_names("convolution _convolution convolution_backward", _cpu_convolution),
    **_names("mm bmm addmm baddbmm addbmm _grouped_mm", _cpu_matmul),
    **_names("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", _cpu_batch_norm),
    "native_batch_norm_backward": lambda call: _first(call).dense_bytes + _cpu_batch_norm(call),
    **_names("gather scatter scatter_add scatter_reduce index_add index_reduce", _cpu_scatter),
    "index_put": _index,
    "embedding_dense_backward": _copies,
    **_names("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa", _cpu_resize),
    **_names("sum mean cumsum cumprod linalg_vector_norm prod", _converted),
    **_names("sort topk", lambda call: 16 * max(_first(call).size, default=1) * _threads() + _copies(call)),
    "_embedding_bag_backward": lambda call: 32 * call.inputs[1].numel,
    "histc": lambda call: 64 * KB,
}

_CUDA: dict[str, Rule] = {
    **_names("native_dropout native_dropout_backward _fused_dropout gelu gelu_backward", _nothing),
    **_names("mm bmm addmm baddbmm addbmm", _nothing),
    **_names("_softmax _log_softmax native_layer_norm _fused_rms_norm embedding", _copies),
    "_safe_softmax": lambda call: 2 * _first(call).numel + _copies(call),
    **_names("native_layer_norm_backward _fused_rms_norm_backward", _cuda_layer_norm_backward),
    **_names("native_group_norm native_group_norm_backward", _cuda_group_norm),
    **_names(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm_backward "
        "cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward",
        _cuda_batch_norm,
    ),
    # Planned as fake CPU, flash attention has this name, whatever runs it later.
    **_names(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        _cuda_flash,
    ),
    **_names(
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward",
        _cuda_flash_backward,
    ),
    **_names("convolution _convolution convolution_backward", _cuda_convolution),
    "embedding_dense_backward": _cuda_embedding_backward,
    **_names("index_put _unsafe_index_put", _cuda_index_put),
    **_names("gather scatter scatter_add scatter_reduce index_add", _nothing),
    **_names("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", _nothing),
    **_names("sum mean prod linalg_vector_norm", lambda call: min(64 * _output_bytes(call), 4 * MB) + 4 * KB),
    **_names("sort topk argsort", _cuda_sort),
    **_names("cumsum cumprod", _cuda_scan),
    **_names("_grouped_mm histc", lambda call: MB),
}
