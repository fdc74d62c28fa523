"""Rules for the workspace of torch's CUDA kernels, in bytes: upper bounds, read from their sources."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable

import torch

from memopt.device.hardware import Chip
from memopt.device.op_call import OpCall, TensorSpec
from memopt.device.workspace_reductions import REDUCTIONS, reduction_bytes
from memopt.device.workspace_rules import (
    KB,
    MASKS,
    MB,
    Rule,
    all_bytes,
    broadcast_numel,
    copies,
    first,
    for_each,
    fp8_scales,
    index,
    nothing,
    output_bytes,
    strided_rows,
    wide_index,
)
from passes.ops.fp8_kernels import library


def library_workspaces(major: int) -> tuple[int, ...]:
    """Bytes of the blocks that cuBLAS and cuBLASLt allocate at their first calls and keep, on a card whose compute
    capability has the major version `major`: two workspaces each, since the caller's thread and autograd's have handles
    of their own. Torch holds fewer bytes where it is set to let cuBLASLt share the workspace of cuBLAS, or not to keep
    any. The environment's `CUBLAS_WORKSPACE_CONFIG` (`:KiB:count` pairs) and `CUBLASLT_WORKSPACE_SIZE` (KiB) are
    respected. Source: aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`,
    `parseCUDABlasLtWorkspaceSize`."""
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    default = 32 * MB if major in (9, 10, 12) else 2 * 4096 * KB + 8 * 16 * KB
    matmul = sum(int(size) * KB * int(count) for size, count in pairs) if pairs else default
    light = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (matmul, int(light) * KB if light.isdecimal() else MB) * 2


def _cuda_flash_backward(call: OpCall) -> int:
    """Bytes of FlashAttention-2's backward: dQ in fp32, padded to 128 rows and 32 columns, its row sums, and dK and dV
    of each query head."""
    return _attention_backward(call, columns=-(-call.inputs[1].size[3] // 32) * 32 + 1)


def _cuda_efficient_backward(call: OpCall) -> int:
    """Bytes of the memory-efficient kernel's backward. It holds what FlashAttention-2's does, but with dQ padded to 32,
    64 or a multiple of 128 columns; in addition locks, and parts of dK and dV where heads are few."""
    width = call.inputs[1].size[3]
    padded = next((columns for columns in (32, 64) if width <= columns), -(-width // 128) * 128)
    return _attention_backward(call, columns=padded + 2) + 512 * KB


def _attention_backward(call: OpCall, columns: int) -> int:
    query, key = call.inputs[1:3]
    batch, heads = query.size[0], max(query.size[1], key.size[1])
    rows = -(-query.size[2] // 128) * 128
    grouped = 2 * batch * heads * key.size[2] * key.size[3] * key.dtype.itemsize if key.size[1] < heads else 0
    return batch * heads * rows * columns * 4 + grouped + strided_rows(call)


def _cuda_flash(call: OpCall, chip: Chip) -> int:
    """Bytes of flash attention. Where there are few query blocks, the keys are split into parts, each with an fp32
    output, so that there are blocks for twice the card's multiprocessors."""
    batch, heads, rows, width = first(call).size
    keys = call.inputs[1].size[2]
    blocks = batch * heads * -(-rows // 64)
    parts = min(-(-keys // 64), 128, 2 * chip.multiprocessors // max(1, blocks))
    return parts * batch * heads * rows * (width + 1) * 4 if parts > 1 else 0


def _cuda_embedding_backward(call: OpCall) -> int:
    """Bytes of an embedding's backward. Indices are sorted with their positions (int64, double buffers), then rows are
    summed in fp32 by parts of ten. Gradients that are scaled by frequency need the count of each index too."""
    gradient, indices = call.inputs[:2]
    rows = call.argument(2)
    if not isinstance(rows, int):
        rows = indices.numel
    parts = indices.numel // 10 + min(indices.numel, rows)
    sorts = (7 if call.argument(4) else 6) * 8 * indices.numel + 16 * KB
    return sorts + parts * -(-gradient.size[-1] // 32) * 32 * 4 + copies(call)


def _cuda_index_put(call: OpCall) -> int:
    """Bytes of `index_put`: linear indices, sorted with their positions, and a copy of values that are broadcast or not
    contiguous."""
    changed, *indices, values = call.inputs
    indexed = broadcast_numel(indices)
    named = isinstance(call.argument(1), tuple) and len(indices) == len(call.argument(1))
    dims = sum(len(spec.size) if spec.dtype in MASKS else 1 for spec in indices)
    written = indexed * math.prod(changed.size[dims:]) if named else max(changed.numel, values.numel)
    direct = values.contiguous and values.numel == written
    return 6 * 8 * indexed + (0 if direct else written * values.dtype.itemsize) + index(call) + 8 * KB


def _cuda_masked_index_put(call: OpCall) -> int:
    """Bytes of `_unsafe_masked_index_put_accumulate` where inductor does not generate its kernel: as for `index_put`, a
    copy of the values, with zeros where the mask is false, and a copy of the indices within bounds."""
    _, _, *indices, values = call.inputs
    indexed = broadcast_numel(indices)
    return values.numel * values.dtype.itemsize + 6 * 8 * indexed + 2 * sum(spec.bytes for spec in indices) + 8 * KB


def _cuda_norm_backward(call: OpCall, chip: Chip) -> int:
    """Bytes of a layer norm's or RMS norm's backward. Where there are many rows and few columns, it holds the gradients
    of weight and bias of each part of the rows, which are then summed. Source:
    aten/src/ATen/native/cuda/layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`."""
    spec, shape = first(call), call.argument(2)
    columns = math.prod(shape)
    rows, wide = spec.numel // max(1, columns), -(-columns // 32)
    if rows <= 64 * 1024 or wide >= chip.multiprocessors // 2:
        return copies(call)
    parts = TensorSpec((min(32 * 1024 // wide, -(-rows // 32)), columns), (columns, 1), spec.dtype)
    summed = OpCall(torch.ops.aten.sum.dim_IntList, (parts, (0,)), (), TensorSpec((columns,), (1,), spec.dtype))
    return (len(call.outputs) - 1) * parts.bytes + reduction_bytes(summed, chip) + copies(call)


def _cuda_group_norm(call: OpCall) -> int:
    samples, channels = first(call).size[:2]
    return 6 * samples * channels * 4 + copies(call)


def _cuda_batch_norm(call: OpCall) -> int:
    """Bytes of a batch norm: mean, variance and count of each channel in each part of the rows, where channels are
    last."""
    return _batch_norm_parts(call, values=4) + _copies_of_images(call)


def _cuda_batch_norm_backward(call: OpCall) -> int:
    """Bytes of a batch norm's backward: two sums of each channel where channels are last. The sums of each part of the
    rows count only as far as they exceed the gradient of the images, before whose allocation they are freed."""
    spec = first(call)
    sums = 2 * 4 * spec.size[1] if _channels_last(spec) else 0
    return sums + max(0, _batch_norm_parts(call, values=2) - spec.dense_bytes) + _copies_of_images(call)


def _cudnn_batch_norm(call: OpCall) -> int:
    """Bytes of cuDNN's batch norm or its backward, which were not measured: the most that torch's own kernels for
    channels last allocate."""
    return 2 * 128 * 4 * first(call).size[1] + _copies_of_images(call)


def _copies_of_images(call: OpCall) -> int:
    """Bytes of contiguous copies of the images; 0 where all are dense with equal strides, channels last as well."""
    images = [spec for spec in call.inputs if len(spec.size) > 1]
    alike = all(spec.dense and spec.stride == images[0].stride for spec in images)
    return 0 if alike else copies(call)


def _batch_norm_parts(call: OpCall, *, values: int) -> int:
    """Bytes of partial results of a batch norm: for each part into which the rows are cut, `values` numbers in fp32 for
    each channel, and a counter for each column of blocks. 0 where channels are not last, or rows are few. Source:
    aten/src/ATen/native/cuda/Normalization.cuh, `flexible_launch_configs`."""
    spec = first(call)
    channels = spec.size[1]
    if not _channels_last(spec) or not spec.numel:
        return 0
    rows, threads, rows_each = spec.numel // channels, 512, 16
    wide = min(_power_of_two_within(channels), 32)
    high = min(_power_of_two_within(-(-rows // rows_each)), threads // wide)
    if wide * high != threads:
        wide = min(_power_of_two_within(channels), threads // high)
    parts = min(-(-rows // (high * rows_each)), 128)
    return 4 * values * channels * parts + 4 * -(-channels // wide) if parts >= 8 else 0


def _channels_last(spec: TensorSpec) -> bool:
    """Whether batch norm runs its kernels for channels that are last in memory on this tensor."""
    return spec.stride[1] == 1 and (spec.contiguous or (spec.dense and len(spec.size) == 4))


def _power_of_two_within(number: int) -> int:
    """The largest power of two that is at most a positive number."""
    return 1 << (number.bit_length() - 1)


def _cuda_matmul(call: OpCall) -> int:
    """Bytes of the copies of matrices that have gaps both along rows and along columns, which cuBLAS does not take."""
    return sum(spec.dense_bytes for spec in call.inputs if len(spec.size) > 1 and not _is_matrix(spec))


def _is_matrix(spec: TensorSpec) -> bool:
    (rows, columns), (down, along) = spec.size[-2:], spec.stride[-2:]
    return (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows))


def _cuda_softmax_backward(call: OpCall) -> int:
    """Bytes of a softmax's backward: the product of the gradient and the result, in the wider of their dtypes."""
    return first(call).numel * max(spec.dtype.itemsize for spec in call.inputs[:2]) + copies(call)


def _cuda_topk(call: OpCall) -> int:
    """Bytes of `topk`: counts of digits for each part of a long row, and the results sorted."""
    return 2 * first(call).numel + 2 * output_bytes(call) + MB


def _cuda_convolution(call: OpCall) -> int:
    """Bytes of a convolution by cuDNN, a guess: a second layout of every tensor, and the workspace of its algorithm,
    which it chooses when it runs."""
    return all_bytes(call) + 32 * MB


def _cuda_convolution_backward(call: OpCall, chip: Chip) -> int:
    """Bytes of a convolution's backward, which are those of the forward. The gradient of the bias is a reduction of
    torch's own over all dimensions but the channels; the larger of both counts."""
    gradient, wanted = first(call), call.argument(10, "output_mask")
    channels = gradient.size[1]
    bias = TensorSpec((channels,), (1,), gradient.dtype)
    others = tuple(dim for dim in range(len(gradient.size)) if dim != 1)
    summed = OpCall(torch.ops.aten.sum.dim_IntList, (gradient, others), (), bias)
    return max(_cuda_convolution(call), reduction_bytes(summed, chip) if wanted[2] else 0)


def _cuda_sort(call: OpCall) -> int:
    spec = first(call)
    return 2 * (spec.dense_bytes + 8 * spec.numel) + MB


def _cuda_scan(call: OpCall) -> int:
    """Bytes of a scan such as `cumsum`: a copy in the result's dtype, where the input has another."""
    return (output_bytes(call) if first(call).dtype != call.outputs[0].dtype else 0) + MB


def _cuda_fp8_matmul(call: OpCall) -> int:
    """Bytes of an 8-bit matmul: copies of both operands in the result's dtype, as where there are no 8-bit units, more
    than the transposed copies for such units; and 256 MB where torchao times its kernels."""
    a, a_scale, b = call.inputs[:3]
    timed = 256 * MB if a_scale.size and library() == "torchao" else 0
    return call.outputs[0].dtype.itemsize * (a.numel + b.numel) + fp8_scales(call) + timed


CUDA_RULES: dict[str, Rule] = {
    **for_each("fp8_quantize fp8_quantize_by fp8_dequantize", lambda call: fp8_scales(call) + copies(call) + 4 * MB),
    "fp8_matmul": _cuda_fp8_matmul,
    **for_each("native_dropout native_dropout_backward _fused_dropout gelu gelu_backward", nothing),
    **for_each("mm bmm addmm baddbmm addbmm", _cuda_matmul),
    "_softmax_backward_data": _cuda_softmax_backward,
    **for_each("_softmax _log_softmax native_layer_norm _fused_rms_norm embedding", copies),
    "_safe_softmax": lambda call: 2 * first(call).numel + copies(call),
    **for_each("native_group_norm native_group_norm_backward", _cuda_group_norm),
    **for_each("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", _cuda_batch_norm),
    "native_batch_norm_backward": _cuda_batch_norm_backward,
    **for_each("cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward", _cudnn_batch_norm),
    "_scaled_dot_product_flash_attention_backward": _cuda_flash_backward,
    # Plans are traced on fake CPU tensors, where attention has the first name, whichever kernel runs it later.
    **for_each(
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_efficient_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward",
        _cuda_efficient_backward,
    ),
    **for_each("convolution _convolution", _cuda_convolution),
    "embedding_dense_backward": _cuda_embedding_backward,
    **for_each("index_put _unsafe_index_put", _cuda_index_put),
    "_unsafe_masked_index_put_accumulate": _cuda_masked_index_put,
    **for_each("gather scatter scatter_add index_add", wide_index),
    **for_each("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", nothing),
    **for_each("sort argsort", _cuda_sort),
    "topk": _cuda_topk,
    **for_each("cumsum cumprod", _cuda_scan),
    # The last two are transformers', in Python: products of slices, written into the result.
    **for_each("_grouped_mm histc grouped_mm_fallback grouped_mm_fallback_backward", lambda call: MB),
}

CUDA_BY_CHIP: dict[str, Callable[[OpCall, Chip], int]] = {
    "convolution_backward": _cuda_convolution_backward,
    **for_each("native_layer_norm_backward _fused_rms_norm_backward", _cuda_norm_backward),
    **for_each(REDUCTIONS, reduction_bytes),
    **for_each(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        _cuda_flash,
    ),
}
"""Rules for kernels whose grid is chosen by the multiprocessors of the card."""
