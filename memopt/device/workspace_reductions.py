"""The staging buffer of torch's CUDA reductions, in bytes: the same arithmetic by which torch configures the kernel.
Where several thread blocks reduce to one result, each writes its partial result to this buffer; where the fastest
dimension is not reduced, as for the gradients of biases, each column of threads in a block does: 2 to 512 MiB in all.

Source: aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig`, `ReduceConfig::global_memory_size`, and
aten/src/ATen/TensorIterator.cpp, `reorder_dimensions`, `coalesce_dimensions`, `SplitUntil32Bit`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from memopt.compat.operators import schema_of
from memopt.device.hardware import Chip
from memopt.device.op_call import OpCall, TensorSpec

REDUCTIONS = "sum nansum mean var var_mean std std_mean prod linalg_vector_norm amax amin argmax argmin max min any all"
"""The names of the reductions that have such a buffer."""
_MOST_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""If one thread would add up at least the second number of values, the work is divided among thread blocks, as far as
the card has room for more of them and a thread is left with at least the first number."""
_INDEXABLE = 2**31 - 1
_BLOCK = 512
_ACCUMULATORS = {
    **dict.fromkeys(("var", "var_mean", "std", "std_mean"), 16),  # mean, second moment, two counts
    **dict.fromkeys(("argmax", "argmin", "max", "min"), 16),  # a value and its position
    **dict.fromkeys(("any", "all"), 1),
}
"""Bytes of an accumulator that is no number of the result's kind, by the operator's name; twice that in fp64."""


@dataclass(frozen=True)
class _Dimension:
    size: int
    stride: int
    """Bytes between neighbours in the input."""
    reduced: bool


def reduction_bytes(call: OpCall, chip: Chip) -> int:
    """Bytes of the staging buffer of a reduction over the call's first input, besides its input and results."""
    spec = call.inputs[0]
    if not spec.numel or not call.outputs:
        return 0
    over = _reduced(call, len(spec.size))
    element = _accumulator_bytes(call)
    return _staged(_coalesced(_in_order(spec, over)), spec.dtype.itemsize, element, chip) + _accumulated(call, element)


def _reduced(call: OpCall, ndim: int) -> frozenset[int]:
    """The dimensions that the call reduces: those that it names, or all."""
    names = [argument.name for argument in schema_of(call.op).arguments]
    given = call.argument(names.index("dim"), "dim") if "dim" in names else None
    dims = (given,) if isinstance(given, int) else given
    return frozenset(dim % max(1, ndim) for dim in dims) if dims else frozenset(range(ndim))


def _accumulator_bytes(call: OpCall) -> int:
    """Bytes of the accumulator of one thread: fp32 for sums in 16 bits, int64 for integers."""
    given, made = call.inputs[0].dtype, call.outputs[0].dtype
    if call.name in _ACCUMULATORS:
        return _ACCUMULATORS[call.name] * (2 if torch.float64 in (given, made) else 1)
    if call.name in ("amax", "amin"):
        return given.itemsize
    return max(4, given.itemsize, made.itemsize) if given.is_floating_point else 8


def _in_order(spec: TensorSpec, over: frozenset[int]) -> list[_Dimension]:
    """The dimensions in the order of torch's iterator: those reduced (`over`) first, by their strides; then the others,
    the last one first, since results are contiguous."""
    width = spec.dtype.itemsize
    all_of = [
        _Dimension(size, stride * width, number in over)
        for number, (size, stride) in enumerate(zip(spec.size, spec.stride, strict=True))
        if size != 1
    ]
    reduced = sorted((one for one in reversed(all_of) if one.reduced), key=lambda one: one.stride)
    return reduced + [one for one in reversed(all_of) if not one.reduced]


def _coalesced(dims: Iterable[_Dimension]) -> list[_Dimension]:
    """The dimensions, with neighbours merged where one stride leads through both."""
    found: list[_Dimension] = []
    for dim in dims:
        if found and found[-1].reduced == dim.reduced and found[-1].size * found[-1].stride == dim.stride:
            found[-1] = replace(found[-1], size=found[-1].size * dim.size)
        else:
            found.append(dim)
    return found


def _staged(dims: list[_Dimension], width: int, element: int, chip: Chip) -> int:
    """Bytes of the staging buffer of a reduction. An input that is too large for 32-bit offsets is reduced in halves,
    of which the larger buffer counts. `width` and `element` are the bytes of an input element and of an accumulator."""
    if sum((dim.size - 1) * dim.stride for dim in dims) <= _INDEXABLE:
        return _buffer(dims, width, element, chip)
    at = max(range(len(dims)), key=lambda number: (dims[number].size - 1) * dims[number].stride)
    first = dims[at].size // 2
    parts = (first, dims[at].size - first)
    halves = ([*dims[:at], replace(dims[at], size=size), *dims[at + 1 :]] for size in parts)
    return max(_staged(half, width, element, chip) for half in halves)


def _buffer(dims: list[_Dimension], width: int, element: int, chip: Chip) -> int:
    """Bytes of the staging buffer and of the counters of its thread blocks; 0 where one thread block computes a result.
    `width` and `element` are the bytes of an input element and of an accumulator."""
    outputs = math.prod(dim.size for dim in dims if not dim.reduced)
    inputs = math.prod(dim.size for dim in dims if dim.reduced)
    kept = next((number for number, dim in enumerate(dims) if not dim.reduced), len(dims))
    on_fastest = kept == len(dims) or (kept > 0 and dims[0].stride < dims[kept].stride)
    along, across = (inputs, outputs) if on_fastest else (outputs, inputs)
    vector = 1
    if dims and dims[0 if on_fastest else kept].stride == width:
        if on_fastest and along >= 128 and kept == 1:
            along //= 4
        elif not on_fastest:
            vector = _vector(dims, kept, width)
            along //= vector
    columns, rows = _thread_block(along, across, _MOST_THREADS // vector)
    step_inputs, step_outputs = (columns, 1) if on_fastest else (1, columns)
    split = -(-inputs // step_inputs) >= min(rows * 16, _MOST_VALUES)
    if split:
        step_inputs *= rows
    else:
        step_outputs *= rows
    grid = -(-(outputs // vector) // step_outputs)
    target = chip.multiprocessors * (chip.threads // (columns * rows))
    values = -(-inputs // step_inputs)
    if not split or values < _MOST_VALUES or grid > target:
        return 0
    parts = max(min(-(-target // grid), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if parts == 1:
        return 0
    staged = element * outputs * parts * (1 if on_fastest else columns * vector)
    return _in_blocks(staged) + _in_blocks(4 * grid)


def _vector(dims: list[_Dimension], kept: int, width: int) -> int:
    """The number of results that one thread computes: 4, or fewer where rows are not aligned. `kept` is the position of
    the first dimension that is not reduced, `width` the bytes of an input element."""
    divisor = math.gcd(4, dims[kept].size)
    for number, dim in enumerate(dims):
        if number != kept:
            divisor = math.gcd(divisor, dim.stride // width)
    return divisor


def _thread_block(along: int, across: int, most: int) -> tuple[int, int]:
    """The columns and rows of a block of at most `most` threads, for sizes `along` and `across` the fastest one."""
    width, height = (min(most, 1 << (max(1, size).bit_length() - 1)) for size in (along, across))
    columns = min(width, _WARP)
    rows = min(height, most // columns)
    return min(width, most // rows), rows


def _accumulated(call: OpCall, element: int) -> int:
    """Bytes of the tensor in which the results of the parts of an input are added up if it is too large for 32-bit
    offsets; `element` is the bytes of an accumulator. 0 where the result itself can hold them; it cannot in 16 bits, or
    where an accumulator is more than one number."""
    given, made = call.inputs[0], call.outputs[0]
    narrow = given.dtype == made.dtype and made.dtype.itemsize < 4
    apart = narrow or call.name in _ACCUMULATORS
    return (
        _in_blocks(element * made.numel) if apart and element > made.dtype.itemsize and given.bytes > _INDEXABLE else 0
    )


def _in_blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK
