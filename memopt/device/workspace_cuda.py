"""Rules for the workspace of torch's CUDA kernels, in bytes: upper bounds, read from their sources."""

from __future__ import annotations

import os
import re

from memopt.device.op_call import OpCall
from memopt.device.workspace_rules import (
    KB,
    MB,
    Rule,
    all_bytes,
    copies,
    first,
    for_each,
    fp8_scales,
    index,
    nothing,
    output_bytes,
)
from passes.ops.fp8_kernels import library


def library_workspaces(major: int) -> tuple[int, ...]:
    """Bytes of the blocks that cuBLAS and cuBLASLt allocate at their first calls and keep, on a card of compute
    capability `major`.

    The caller's thread and autograd's have handles of their own, with a workspace for each. The bytes are fewer where
    torch lets cuBLASLt share the workspace of cuBLAS, or does not keep them. The environment's
    `CUBLAS_WORKSPACE_CONFIG` (`:KiB:count` pairs) and `CUBLASLT_WORKSPACE_SIZE` (KiB) are respected.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`, `parseCUDABlasLtWorkspaceSize`.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    default = 32 * MB if major in (9, 10, 12) else 2 * 4096 * KB + 8 * 16 * KB
    matmul = sum(int(size) * KB * int(count) for size, count in pairs) if pairs else default
    light = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (matmul, int(light) * KB if light.isdecimal() else MB) * 2


def _cuda_flash_backward(call: OpCall) -> int:
    """FlashAttention-2: dQ in fp32, padded to 128 rows and 32 columns, its row sums, and dK and dV of each query
    head."""
    query, key = call.inputs[1:3]
    batch, heads = query.size[0], max(query.size[1], key.size[1])
    rows = -(-query.size[2] // 128) * 128
    gradient = batch * heads * rows * (-(-query.size[3] // 32) * 32 + 1) * 4
    grouped = 2 * batch * heads * key.size[2] * key.size[3] * key.dtype.itemsize if key.size[1] < heads else 0
    return gradient + grouped + copies(call)


def _cuda_flash(call: OpCall) -> int:
    """Where there are few query blocks, the keys are split into parts, each with an fp32 output, to fill 132
    multiprocessors."""
    batch, heads, rows, width = first(call).size
    keys = call.inputs[1].size[2]
    blocks = batch * heads * -(-rows // 64)
    parts = min(-(-keys // 64), 128, 264 // max(1, blocks))
    return parts * batch * heads * rows * (width + 1) * 4 if parts > 1 else 0


def _cuda_embedding_backward(call: OpCall) -> int:
    """Indices are sorted with their positions (int64, double buffers), then rows are summed in fp32 by parts of ten."""
    gradient, indices = call.inputs[:2]
    rows = call.argument(2)
    if not isinstance(rows, int):
        rows = indices.numel
    parts = indices.numel // 10 + min(indices.numel, rows)
    return 6 * 8 * indices.numel + parts * -(-gradient.size[-1] // 32) * 32 * 4 + copies(call)


def _cuda_index_put(call: OpCall) -> int:
    """Linear indices, sorted with their positions, and an expanded copy of broadcast values."""
    indexed = max((spec.numel for spec in call.inputs[1:-1]), default=0)
    return 6 * 8 * indexed + call.inputs[-1].dense_bytes + index(call)


def _cuda_layer_norm_backward(call: OpCall) -> int:
    row = call.inputs[-1].size[-1]
    return 2 * 512 * row * 4 + copies(call)


def _cuda_group_norm(call: OpCall) -> int:
    samples, channels = first(call).size[:2]
    return 6 * samples * channels * 4 + copies(call)


def _cuda_batch_norm(call: OpCall) -> int:
    return 2 * 128 * first(call).size[1] * 4 + copies(call)


def _cuda_convolution(call: OpCall) -> int:
    """cuDNN: a second layout of every tensor, and the workspace of its algorithm, which it chooses when it runs (a
    guess)."""
    return all_bytes(call) + 32 * MB


def _cuda_sort(call: OpCall) -> int:
    spec = first(call)
    return 2 * (spec.dense_bytes + 8 * spec.numel) + MB


def _cuda_scan(call: OpCall) -> int:
    """A copy in the result's dtype, where the input has another."""
    return (output_bytes(call) if first(call).dtype != call.outputs[0].dtype else 0) + MB


def _cuda_fp8_matmul(call: OpCall) -> int:
    """Copies of both operands in the result's dtype, where there are no 8-bit units; these are larger than the
    transposed copies that such units need. torchao times its kernels, and allocates a buffer of 256 MB for that."""
    a, a_scale, b = call.inputs[:3]
    timed = 256 * MB if a_scale.size and library() == "torchao" else 0
    return call.outputs[0].dtype.itemsize * (a.numel + b.numel) + fp8_scales(call) + timed


CUDA: dict[str, Rule] = {
    **for_each("fp8_quantize fp8_quantize_by fp8_dequantize", lambda call: fp8_scales(call) + copies(call) + 4 * MB),
    "fp8_matmul": _cuda_fp8_matmul,
    **for_each("native_dropout native_dropout_backward _fused_dropout gelu gelu_backward", nothing),
    **for_each("mm bmm addmm baddbmm addbmm", nothing),
    **for_each("_softmax _log_softmax native_layer_norm _fused_rms_norm embedding", copies),
    "_safe_softmax": lambda call: 2 * first(call).numel + copies(call),
    **for_each("native_layer_norm_backward _fused_rms_norm_backward", _cuda_layer_norm_backward),
    **for_each("native_group_norm native_group_norm_backward", _cuda_group_norm),
    **for_each(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional native_batch_norm_backward "
        "cudnn_batch_norm cudnn_batch_norm_backward batch_norm_backward",
        _cuda_batch_norm,
    ),
    # Plans are traced on fake CPU tensors, where flash attention has this name, whichever kernel runs it later.
    **for_each(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
        _cuda_flash,
    ),
    **for_each(
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward",
        _cuda_flash_backward,
    ),
    **for_each("convolution _convolution convolution_backward", _cuda_convolution),
    "embedding_dense_backward": _cuda_embedding_backward,
    **for_each("index_put _unsafe_index_put", _cuda_index_put),
    **for_each("gather scatter scatter_add scatter_reduce index_add", nothing),
    **for_each("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d", nothing),
    **for_each(
        "sum mean var var_mean std prod linalg_vector_norm", lambda call: min(64 * output_bytes(call), 4 * MB) + 4 * KB
    ),
    **for_each("sort topk argsort", _cuda_sort),
    **for_each("cumsum cumprod", _cuda_scan),
    **for_each("_grouped_mm histc", lambda call: MB),
}
