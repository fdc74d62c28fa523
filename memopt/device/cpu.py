"""The CPU as a device: its memory is the host's. The bytes that a kernel allocates are measured, or found by rules,
which return upper bounds that tests compare with measurements."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memopt.compat.host import HOST
from memopt.compat.operators import schema_of
from memopt.device.device import Device
from memopt.device.hardware import LARGE, Chip, Hardware, physical_bytes
from memopt.device.op_call import OpCall, TensorSpec
from memopt.device.workspace_rules import (
    KB,
    MAKE_CONTIGUOUS,
    SCALARS,
    Rule,
    all_bytes,
    by_counts,
    by_rules,
    chunked_loss,
    class_vectors,
    copies,
    first,
    for_each,
    fp8_scales,
    index,
    input_bytes,
    nothing,
    one_input,
    output_bytes,
)
from passes.ops.fp8_formats import LONGEST, PART_ELEMENTS


def promoted(call: OpCall) -> int:
    """Workspace bytes of a pointwise kernel: the CPU copies every argument whose dtype is not the common one. CUDA does
    not, since its kernels convert as they read."""
    values = [s for s in call.inputs if s.dtype != torch.bool] if "where" in str(call.op) else list(call.inputs)
    common = values[0].dtype
    for spec in values[1:]:
        common = torch.promote_types(common, spec.dtype)
    copies = sum(spec.numel * common.itemsize for spec in values if spec.dtype != common)
    results = sum(spec.numel * common.itemsize for spec in call.outputs if spec.dtype not in (common, torch.bool))
    return copies + results


def converted(call: OpCall) -> int:
    """Workspace bytes of a reduction or scan that accumulates integers in int64, 16 bits in fp32."""
    spec = first(call)
    accumulator = 4 if spec.dtype.is_floating_point else 8
    outputs = sum(out.numel for out in call.outputs)
    if spec.dtype.itemsize >= accumulator and spec.dtype == call.outputs[0].dtype:
        return SCALARS
    return (spec.numel + outputs) * max(accumulator, call.outputs[0].dtype.itemsize) + SCALARS


def _cpu_softmax(call: OpCall) -> int:
    """Bytes of a softmax: a copy of an input that is not contiguous, and the block by which that copy transposes it."""
    return copies(call) + (_TRANSPOSED * first(call).dtype.itemsize if copies(call) else 0)


_TRANSPOSED = 60 * 60
"""Elements of the block in which a copy transposes a matrix."""
_BLOCK = 16
"""The channels that oneDNN computes together with vectors of 512 bits."""


def _cpu_safe_softmax(call: OpCall) -> int:
    """Bytes of `_safe_softmax`: to find fully masked rows, it holds a mask of the input's size and two values a row."""
    spec = first(call)
    rows = spec.numel // max(1, spec.size[call.argument(1)]) if spec.size else 1
    return spec.numel + 4 * rows + SCALARS + _cpu_softmax(call)


def _cpu_layer_norm_backward(call: OpCall) -> int:
    row = math.prod(call.argument(2)) if isinstance(call.argument(2), tuple) else first(call).size[-1]
    return 2 * torch.get_num_threads() * row * 4 + copies(call)


def _cpu_group_norm(call: OpCall) -> int:
    samples, channels = first(call).size[:2]
    return 4 * samples * channels * 4 + torch.get_num_threads() * channels * 8 + copies(call)


def _cpu_flash(call: OpCall) -> int:
    """Bytes of flash attention: for each thread the scores of up to 256 queries by 512 keys; in 16 bits also packed
    copies of keys and values."""
    query = first(call)
    keys = max(spec.size[-2] for spec in call.inputs[:3])
    rows, columns = min(256, query.size[-2]), min(512, keys)
    elements = rows * columns + 2 * rows + rows * query.size[-1]
    packed = 0 if query.dtype.itemsize >= 4 else 2 * sum(s.dense_bytes for s in call.inputs[1:3]) + 64 * KB
    return torch.get_num_threads() * elements * (4 if packed == 0 else 6) + packed


def _cpu_flash_backward(call: OpCall) -> int:
    query, key = call.inputs[1:3]
    rows, columns = min(256, query.size[-2]), min(512, key.size[-2])
    return 2 * torch.get_num_threads() * (2 * rows * columns + 2 * rows) * 4 + 8 * KB + copies(call) // 4


def _cpu_convolution(call: OpCall) -> int:
    """Bytes of a convolution or its backward. oneDNN copies all arguments to layouts of its own, in which the channels
    of images, and of each group of weights, fill blocks of 16; in 16 bits it holds fp32 copies beside them. It does not
    take fp64, for which torch unfolds the images to columns for a matmul."""
    backward = "backward" in schema_of(call.op).name
    weight, groups = call.argument(2 if backward else 1), call.argument(9 if backward else 8)
    channels = [-(-weight.size[0] // groups // _BLOCK) * _BLOCK, -(-weight.size[1] // _BLOCK) * _BLOCK]
    bytes_each = 4 if weight.dtype.itemsize >= 4 else 4 + weight.dtype.itemsize
    blocks = bytes_each * groups * math.prod([*channels, *weight.size[2:]])
    columns = first(call).size[0] * math.prod(weight.size[1:]) * max(math.prod(s.size[2:]) for s in call.inputs[:2]) * 8
    images = (call.inputs[0], call.inputs[1] if backward else call.outputs[0])
    filled = sum(bytes_each * s.numel // max(1, s.size[1]) * (-s.size[1] % _BLOCK) for s in images)
    return 2 * all_bytes(call) + 64 * KB + blocks + filled + (columns if first(call).dtype == torch.float64 else 0)


def _cpu_matmul(call: OpCall) -> int:
    """Bytes of a matmul: copies of operands with neither rows nor columns that are contiguous; in 16 bits, oneDNN
    reorders transposed operands, and without bfloat16 units it sums into a float32 buffer of the size of the result."""
    if first(call).dtype.itemsize < 4:
        return input_bytes(call) + 4 * call.outputs[0].numel + 256 * KB
    return sum(spec.dense_bytes for spec in call.inputs if spec.size and 1 not in spec.stride[-2:])


def _cpu_chunked_loss(call: OpCall) -> int:
    """Bytes of the chunked cross entropy; it has numbers for each class only with a bias, or class weights."""
    by_class = call.argument(2) is not None or call.argument(4) is not None
    return chunked_loss(call) + _cpu_matmul(call) + (class_vectors(call) if by_class else 0)


def _cpu_fp8(call: OpCall) -> int:
    """Bytes of a quantisation to 8 bits or back: two fp32 copies of a part of the matrix, and a third for the scale of
    each element of that part."""
    spec = first(call)
    rows = min(spec.size[0], max(LONGEST, PART_ELEMENTS // max(1, spec.size[1]) + LONGEST))
    return 12 * rows * spec.size[1] + fp8_scales(call) + copies(call)


def _cpu_fp8_matmul(call: OpCall) -> int:
    """Bytes of an 8-bit matmul: the operands are converted to fp32 one after the other, part by part."""
    a, a_scale, b = call.inputs[:3]

    def making(spec: TensorSpec) -> int:
        part = min(spec.numel, PART_ELEMENTS + LONGEST * spec.size[1])
        return (12 if a_scale.size else 8) * part + (4 * spec.numel if part < spec.numel else 0)

    wide = 4 * (a.numel + b.numel + call.outputs[0].numel)
    return max(making(a), 4 * a.numel + making(b), wide) + fp8_scales(call) + 64 * KB


def _cpu_sort(call: OpCall) -> int:
    return 16 * max(first(call).size, default=1) * torch.get_num_threads() + copies(call)


def _cpu_batch_norm(call: OpCall) -> int:
    return 2 * first(call).size[1] * 8 + 2 * copies(call)


def _cpu_scatter(call: OpCall) -> int:
    """Bytes of a scatter, gather or reduction by an index: fp32 values in 16 bits, a copy of an expanded index."""
    narrow = first(call).dtype.itemsize < 4
    return (4 * max(spec.numel for spec in call.inputs) + 64 * KB if narrow else 0) + by_counts(call)


CPU_RULES: dict[str, Rule] = {
    **for_each("fp8_quantize fp8_quantize_by fp8_dequantize", _cpu_fp8),
    "fp8_matmul": _cpu_fp8_matmul,
    **for_each("native_dropout native_dropout_backward", one_input),
    **for_each("_softmax _log_softmax", _cpu_softmax),
    "_safe_softmax": _cpu_safe_softmax,
    **for_each("native_layer_norm rms_norm _fused_rms_norm embedding embedding_dense_backward gelu", copies),
    "gelu_backward": lambda call: 2 * copies(call),
    **for_each("_softmax_backward_data " + MAKE_CONTIGUOUS, copies),
    **for_each("clone copy _to_copy", lambda call: 8 * _TRANSPOSED if copies(call) else 0),
    **for_each("native_layer_norm_backward _fused_rms_norm_backward", _cpu_layer_norm_backward),
    **for_each("native_group_norm native_group_norm_backward", _cpu_group_norm),
    "_scaled_dot_product_flash_attention_for_cpu": _cpu_flash,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_flash_backward,
    **for_each("convolution _convolution convolution_backward", _cpu_convolution),
    **for_each(
        "dot vdot mv mm bmm addmm baddbmm addbmm _grouped_mm grouped_mm_fallback grouped_mm_fallback_backward",
        _cpu_matmul,
    ),
    **for_each("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", _cpu_batch_norm),
    "native_batch_norm_backward": lambda call: first(call).dense_bytes + _cpu_batch_norm(call),
    **for_each("gather scatter scatter_add scatter_reduce index_add index_reduce", _cpu_scatter),
    "index_put": index,
    **for_each(
        "upsample_linear1d upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa",
        lambda call: all_bytes(call) + 64 * KB,
    ),
    **for_each("sum mean var var_mean std cumsum cumprod linalg_vector_norm prod", converted),
    **for_each("sort topk", _cpu_sort),
    "_embedding_bag_backward": lambda call: 32 * call.inputs[1].numel + input_bytes(call),
    "histc": lambda call: 64 * KB,
    # By gloo, beside its results: a gather has a second buffer for them, a reduce-scatter a copy of its input.
    **for_each("all_reduce all_to_all_single wait_tensor", nothing),
    "all_gather_into_tensor": output_bytes,
    **for_each("reduce_scatter_tensor shard_dim_alltoall", input_bytes),
    **for_each("linear_cross_entropy_with_gradients linear_cross_entropy_weight_gradient", _cpu_chunked_loss),
}


_CGROUP = Path("/sys/fs/cgroup")


class _Cpu(Device):
    def cards(self) -> Mapping[str, Hardware]:
        """One entry for this machine's CPU, whose rates are a guess from its number of threads."""
        threads = torch.get_num_threads()
        core = 2 * 2 * 8 * 2.5e9  # two FMA units of eight lanes at 2.5 GHz
        rates = {"float64": core / 2, "float32": core, "bfloat16": core, "float16": core}
        guess = Hardware(
            name=self.type,
            flops={dtype: threads * rate for dtype, rate in rates.items()},
            bytes_per_second=25.6e9,
            launch_seconds=2e-6,
            memory_bytes=physical_bytes(),
            least_moved_bytes=4096,
            source=f"{threads} threads, each two AVX2 FMA units at 2.5 GHz, and one channel of DDR4-3200; assumed",
            device_type=self.type,
        )
        return {guess.name: guess}

    def workspace(self, call: OpCall, chip: Chip = LARGE) -> int:
        """As for any `Device`; pointwise operators and reductions copy the arguments whose dtype must change."""
        return by_rules(call, CPU_RULES, pointwise=lambda call: promoted(call) + SCALARS, reduction=converted)

    def computes_in(self, card: Hardware, dtype: torch.dtype) -> bool:
        """Whether the CPU has instructions for bfloat16 (AVX512-BF16 or AMX); False for fp16."""
        names = ("avx512_bf16", "amx_bf16", "amx_tile", "bf16") if dtype == torch.bfloat16 else ()
        return any(bool(torch.cpu.get_capabilities().get(name)) for name in names)

    def available(self) -> bool:
        return True

    def in_use(self) -> bool:
        return True

    def hardware(self, device: torch.device) -> Hardware:
        return self.cards()[self.type]

    def reported(self, device: torch.device) -> Hardware:
        return replace(self.hardware(device), major=0, host_bytes=physical_bytes() // 2)

    def identity(self, device: torch.device) -> dict[str, Any]:
        """The name of the processor, and torch's number of threads, by which measurements differ."""
        info = Path("/proc/cpuinfo")
        found = re.search(r"^model name\s*:(.*)$", info.read_text() if info.exists() else "", re.MULTILINE)
        processor = found[1].strip() if found else platform.processor() or platform.machine()
        return {"card": processor, "threads": torch.get_num_threads()}

    def free_bytes(self, device: torch.device) -> int | None:
        """Bytes that Linux says are available, within the limit of this container; None where it says neither."""
        known = [nbytes for nbytes in (_available(), _left_of_container()) if nbytes is not None]
        return min(known, default=None)


def _available() -> int | None:
    with suppress(OSError):
        if found := re.search(r"^MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None


def _left_of_container() -> int | None:
    with suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return max(0, limit - used)
    return None


_SUMS_IN_16_BITS = frozenset({"layer_norm", "native_layer_norm"})
"""Over 30,000 rows in bf16, the gradients of a layer norm's weight and bias are off by a fifth of their size."""
CPU = _Cpu(HOST.type, is_host=True, generator_state_bytes=5056, foreach=False, sums_in_16_bits=_SUMS_IN_16_BITS)
