"""Seconds of an ATen node by the roofline model (Williams et al. 2009): the longest of arithmetic, memory traffic and
launch. Only the fake tensors in `node.meta["val"]` are read, with upper bounds of data-dependent sizes; nothing
runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from memopt.compat.operators import plain_tensors
from memopt.compat.symbols import largest_value
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware, scaled_rate
from memopt.device.op_call import OpCall, flop_formula
from memopt.device.storages import is_mutation, is_view, storage_bytes, tensors_of
from passes.ops.fp8_formats import tile_of, turned

aten = torch.ops.aten

# These read as many bytes of their source as they write, like a few rows of a large embedding.
_GATHERS = {"aten.embedding", "aten.index", "aten._unsafe_index", "aten.index_select", "aten.gather"}
# These read only the shape of their input.
_READ_NOTHING = {
    f"aten.{kind}"
    for make in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for kind in (f"{make}_like", f"new_{make}")
}

MEASURED_TIMES = 0.55, 1.63
"""The smallest and the largest ratio of a step's measured time to its time by this model, of twelve steps on a CPU by
its guessed rates and one on an H100 by its data sheet (1.08): benchmarks/results, step_time and first_day_h100."""


def measured_seconds(seconds: float) -> tuple[float, float]:
    """The range of seconds (least, most) to expect of a step that this model estimates to take `seconds`, by the ratios
    `MEASURED_TIMES` of measured to estimated time."""
    least, most = MEASURED_TIMES
    return least * seconds, most * seconds


_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"}
_MISALIGNED = 5.0


def _turned_bytes(node: fx.Node) -> int:
    """Bytes read and written to copy operands of an 8-bit product whose layout is not the one that its kernel needs:
    the first by rows, the second by columns."""
    a, b, (turn_a, turn_b) = node.args[0], node.args[2], node.args[5:7]
    copied = [operand for operand, copies in ((a, turn_a), (b, not turn_b)) if copies]
    return 2 * sum(_touched_bytes(operand.meta["val"]) for operand in copied if isinstance(operand, fx.Node))


def op_seconds(flops: int, bytes_moved: int, dtype: str, hardware: Hardware) -> float:
    """Estimated seconds of a kernel: max(FLOPs / peak, bytes / bandwidth, launch), where peak and bandwidth are those
    that kernels reach. `dtype` is a key of `Hardware.flops`.

    With a pause between kernels (`Hardware.between_seconds`): pause + launch + max(FLOPs / peak, bytes / bandwidth)."""
    arithmetic = flops / (hardware.peak_flops(dtype) * hardware.flops_efficiency)
    cached = bytes_moved <= hardware.cached_bytes
    bandwidth = hardware.cached_bytes_per_second if cached else hardware.bytes_per_second
    traffic = bytes_moved / (bandwidth * hardware.bandwidth_efficiency) if bytes_moved else 0.0
    if hardware.between_seconds:
        return hardware.between_seconds + hardware.launch_seconds + max(arithmetic, traffic)
    return max(arithmetic, traffic, hardware.launch_seconds)


def node_seconds(node: fx.Node, hardware: Hardware) -> float:
    """Estimated seconds of one evaluation of the node; 0 where no kernel runs, as for views and sizes."""
    if not runs_kernel(node):
        return 0.0
    if _name(node) == "memopt.fp8_matmul":
        return _scaled_product_seconds(node, hardware)
    flops = round(node_flops(node) * (1.0 if device_of(hardware).is_host else _misaligned(node)))
    return op_seconds(flops, node_bytes(node), _arithmetic_dtype(node), hardware)


def _misaligned(node: fx.Node) -> float:
    """The factor by which a matmul takes longer on a card if the rows of a 16-bit matrix are no multiple of 16 bytes:
    cuBLAS then uses kernels of older cards. 1 for any other node. Factors of 3.2 to 7 were measured for 50,257 columns
    on an H100 (`passes.ops.linear_rows`)."""
    if _name(node) not in _PRODUCTS:
        return 1.0
    matrices = [tensor for one in (node, *node.all_input_nodes) for tensor in tensors_of(one) if tensor.dim() > 1]
    rows = [max(one.stride()[-2:]) for one in matrices if one.dtype.itemsize == 2]
    return _MISALIGNED if any(isinstance(row, int) and row % 8 for row in rows) else 1.0


def call_seconds(call: OpCall, hardware: Hardware) -> float:
    """Estimated seconds of one call of an operator, as `node_seconds` gives them for a node of a graph."""
    graph = fx.Graph()

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return [given(element) for element in value] if isinstance(value, list) else value
        node = graph.placeholder("given")
        node.meta["val"] = value
        return node

    with plain_tensors(), torch.no_grad():
        args, kwargs = call.make_arguments("meta")
        node = graph.call_function(call.op, tuple(map(given, args)), {name: given(kwargs[name]) for name in kwargs})
        try:
            node.meta["val"] = call.op(*args, **kwargs)
        except Exception:  # it has no kernel for "meta", or reads values
            node.meta["val"] = call.make_results("meta")
    return node_seconds(node, hardware)


def bound_by_arithmetic(node: fx.Node, hardware: Hardware) -> bool:
    """Whether a node's estimated time is that of its arithmetic, rather than of memory traffic or the launch."""
    flops = node_flops(node) if runs_kernel(node) else 0
    return flops > 0 and op_seconds(flops, 0, _arithmetic_dtype(node), hardware) >= node_seconds(node, hardware)


def _scaled_product_seconds(node: fx.Node, hardware: Hardware) -> float:
    """Seconds of an 8-bit matmul: on units that take its scales, or by converting its operands to a wider dtype where
    the device has none."""
    values: Any = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
    a, a_scale, b, _, _, turn_a = values[:6]
    tile = tile_of(a, a_scale)
    tile = turned(tile) if turn_a else tile
    if hardware.multiplies(tile):
        return op_seconds(node_flops(node), node_bytes(node), scaled_rate(tile), hardware)
    result = node.meta["val"]
    wide = torch.float32 if device_of(hardware).is_host else result.dtype
    making = sum(op_seconds(0, (1 + wide.itemsize) * operand.numel(), "float32", hardware) for operand in (a, b))
    bytes_moved = wide.itemsize * (a.numel() + b.numel()) + _touched_bytes(result)
    return making + op_seconds(node_flops(node), bytes_moved, str(wide).removeprefix("torch."), hardware)


def runs_kernel(node: fx.Node) -> bool:
    """Whether evaluating the node runs a kernel: it is no view, size, assertion or placeholder."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return is_mutation(node) or (any(True for _ in tensors_of(node)) and not is_view(node))


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of a node, two for a multiply-add, of matmuls, convolutions and attention, as in
    torch's flop counter; others are bound by memory and count as 0."""
    formula = _FORMULAS.get(_name(node)) or flop_formula(node.target)
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return largest_value(formula(*args, **kwargs, out_val=node.meta["val"]))


def node_bytes(node: fx.Node) -> int:
    """Bytes that a node's kernel reads and writes; 0 for views. An expanded input counts its bytes in memory."""
    if not runs_kernel(node):
        return 0
    written = sum(_touched_bytes(tensor) for tensor in tensors_of(node))
    name = _name(node)
    if name in _READ_NOTHING:
        return written
    inputs = node.all_input_nodes
    read = sum(_touched_bytes(tensor) for arg in inputs for tensor in tensors_of(arg))
    if name in _GATHERS:
        source = sum(_touched_bytes(tensor) for tensor in tensors_of(inputs[0]))
        read += min(source, written) - source
    extra = _FURTHER_BYTES.get(name)
    return read + written + (extra(node) if extra else 0)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements: a dimension of stride 0 repeats the same ones, overlapping windows share some."""
    if tensor.layout is not torch.strided:
        return 0
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    distinct = math.prod(largest_value(size) for size, stride in axes if not isinstance(stride, int) or stride != 0)
    return min(distinct * tensor.element_size(), storage_bytes(tensor))


def _arithmetic_dtype(node: fx.Node) -> str:
    """The dtype of the units that a matmul or convolution runs on: that of its first floating-point input."""
    for arg in node.all_input_nodes:
        for tensor in tensors_of(arg):
            if tensor.is_floating_point():
                convolves = _name(node).startswith("aten.convolution")
                if convolves and tensor.dtype is torch.float32 and torch.backends.cudnn.allow_tf32:
                    return "tfloat32"
                return str(tensor.dtype).removeprefix("torch.")
    return "float32"


def _name(node: fx.Node) -> str:
    """The name of a node's operator without the overload, such as `aten.mm`: formulas are looked up by name, because
    some operators belong to libraries that need not be installed."""
    return str(getattr(node.target, "overloadpacket", node.target))


def _grouped_matmul(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of a grouped matmul: each row (or column, or summand) belongs to one group, so only a batch multiplies
    them."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any, out_val: Any, **_: Any
) -> int:
    """FLOPs of a convolution's backward: those of the forward for each gradient. torch's formula omits that groups
    divide those of the weight's gradient."""
    transposed: bool = options[4]
    output_mask: Iterable[bool] = options[7]
    forward = conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed=transposed)
    return forward * sum(list(output_mask)[:2])


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(*_shapes(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad.shape, *_shapes(query, key, value))  # type: ignore[no-untyped-call]


def _shapes(query: torch.Tensor, *others: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes, with as many heads as the query has: torch's formula takes fewer for key and value from 2.13 on."""
    heads = query.shape[1]
    return [(one.shape[0], heads, *one.shape[2:]) for one in (query, *others)]


# All have the argument order of CUDA's flash attention.
_KERNELS_OF_ATTENTION = (
    "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
    "fused_attention_overrideable",
)  # fmt: skip
_FORMULAS: Mapping[str, Callable[..., int]] = {
    "aten.linear": lambda x, weight, *_, **__: 2 * x.numel() * weight.shape[0],
    "aten.convolution_backward": _convolution_backward,
    "aten._grouped_mm": _grouped_matmul,
    "transformers.grouped_mm_fallback": _grouped_matmul,
    "transformers.grouped_mm_fallback_backward": lambda a, b, *_, **__: 2 * _grouped_matmul(a, b),
    **{f"aten._scaled_dot_product_{kernel}": _attention for kernel in _KERNELS_OF_ATTENTION},
    **{f"aten._scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS_OF_ATTENTION},
}
_FURTHER_BYTES: Mapping[str, Callable[[fx.Node], int]] = {
    "memopt.fp8_matmul": _turned_bytes,
    # Its input is read once more, to divide by the scale that the first read has found.
    "memopt.fp8_quantize": lambda node: _touched_bytes(node.all_input_nodes[0].meta["val"]),
}
