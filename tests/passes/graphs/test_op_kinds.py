"""Kinds of operators, their in-place variants, and the lists of CUDA's autocast."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt import measure_peak
from memopt.compat.operators import cuda_autocast_names
from passes.graphs.op_kinds import (
    FP32,
    FP32_SET_DTYPE,
    LOWER_PRECISION,
    PROMOTE,
    WITH_INPLACE_VARIANT,
    fills_with,
    follows_input,
    inplace_variants,
    is_cast,
    is_new,
    is_pointwise,
    is_view,
    moves_data,
    mutated_arguments,
    op_name,
    promotes,
)
from tests.passes.capture import Sketch, aten


def test_kinds() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 4)
    calls = {
        "view": sketch.call(aten.view.default, x, [16]),
        "clone": sketch.call(aten.clone.default, x),
        "amax": sketch.call(aten.amax.default, x, [-1]),
        "cast": sketch.call(aten._to_copy.default, x, dtype=torch.bfloat16),
        "new": sketch.call(aten.zeros_like.default, x),
        "add": sketch.call(aten.add.Tensor, x, x),
        "gelu": sketch.call(aten.gelu.default, x),
        "mm": sketch.call(aten.mm.default, x, x),
    }
    kinds = {
        is_view: {"view"},
        moves_data: {"view", "clone"},
        follows_input: {"view", "clone", "amax"},
        is_cast: {"cast"},
        is_new: {"new"},
        promotes: {"add", "clone"},  # torch tags copies as pointwise
    }
    for is_kind, names in kinds.items():
        assert {name for name, call in calls.items() if is_kind(call)} == names, is_kind.__name__
    assert is_pointwise(calls["gelu"])
    assert not is_pointwise(calls["mm"])
    assert (op_name(calls["cast"]), op_name(x)) == ("_to_copy", "")


def test_arguments_that_are_written_to() -> None:
    sketch = Sketch()
    x, y = sketch.input("x", 4), sketch.input("y", 4)
    assert mutated_arguments(sketch.call(aten.add_.Tensor, x, y)) == (x,)
    assert mutated_arguments(sketch.call(aten.add.out, x, x, out=y)) == (y,)
    assert mutated_arguments(sketch.call(aten.add.Tensor, x, y)) == ()


def test_numbers_that_fill() -> None:
    sketch = Sketch()
    x, mask = sketch.input("x", 4), sketch.input("mask", 4, dtype=torch.bool)
    assert fills_with(sketch.call(aten.masked_fill.Scalar, x, mask, -1e9)) == ((2, -1e9),)
    assert fills_with(sketch.call(aten.mul.Tensor, x, 2.0)) == ()


SHAPE = (37, 129)


def arguments(target: Any, dtype: torch.dtype) -> list[Any]:
    """An argument for each one of the operator that is positional: tensors, masks, and numbers."""
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for argument in target._schema.arguments:
        if argument.kwarg_only:
            continue
        kind = str(argument.type)
        if kind == "Tensor":
            if argument.name in ("mask", "condition"):
                values.append(torch.rand(SHAPE, generator=generator) > 0.5)
            elif (target, argument.name) == (torch.ops.aten.masked_fill.Tensor, "value"):
                values.append(torch.tensor(0.5, dtype=dtype))
            else:
                values.append(torch.randn(SHAPE, generator=generator).to(dtype))
        elif kind == "bool":
            values.append(False)
        elif argument.name == "dim":
            values.append(1)
        elif argument.name == "input_dtype":
            values.append(dtype)
        else:
            values.append({"max": 0.75, "max_val": 0.75, "min_val": -0.5}.get(argument.name, 0.5))
    return values


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", list(WITH_INPLACE_VARIANT), ids=str)
def test_variants(target: Any, dtype: torch.dtype) -> None:
    expected = target(*arguments(target, dtype))
    for variant, out in inplace_variants(target):
        given = arguments(target, dtype)
        places = [place for place, tensor in enumerate(given) if isinstance(tensor, Tensor) and tensor.dtype == dtype]
        places = [place for place in places if given[place].dim()] if out else [0]
        assert places
        for place in places:
            given = arguments(target, dtype)
            options = {out: given[place]} if out else {}
            variant(*(tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in given), **options)
            given = arguments(target, dtype)
            options = {out: given[place]} if out else {}
            with measure_peak("cpu") as peak:
                result = variant(*given, **options)
            assert result.data_ptr() == given[place].data_ptr()
            assert result.dtype == expected.dtype
            assert torch.equal(bits(result), bits(expected))
            assert peak.allocated_bytes < expected.nbytes


ROWS = ("_softmax_backward_data", "_log_softmax_backward_data")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 17, 1025), (300, 4, 33)], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_rows(name: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    """Over the gradient that comes in, along any dimension: each has a kernel of its own."""
    target = getattr(torch.ops.aten, name).default
    ((variant, out),) = inplace_variants(target)
    generator = torch.Generator().manual_seed(0)
    gradient, values = (torch.randn(shape, generator=generator) for _ in range(2))
    forward = torch.softmax if name == ROWS[0] else torch.log_softmax
    result, gradient = forward(values, dim).to(dtype), gradient.to(dtype)
    expected = target(gradient, result, dim, dtype)
    over = variant(gradient, result, dim, dtype, **{out: gradient})
    assert over.data_ptr() == gradient.data_ptr()
    assert torch.equal(bits(over), bits(expected))


ELSEWHERE = {"cudnn_convolution", "cudnn_convolution_transpose", "binary_cross_entropy", "norm"}
"""Registered one by one: two that models do not call, one that autocast refuses, one whose dtype it appends."""


SINCE_2_13 = {"rms_norm"} if torch.__version__ < "2.13" else set()
"""Listed by torch 2.13 and by some or none of the versions before it."""

OUTSIDE = {"linalg_matrix_sqrth"}
"""Registered with fp32 by torch 2.15, which does not list them; earlier versions do not have these operators."""


def listed(name: str) -> set[str]:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    body = re.split(r"\n\n", header.partition(f"#define {name}(_)")[2])[0]
    return set(re.findall(r"_\((\w+)", body))


def test_lists_are_those_of_the_header() -> None:
    assert listed("AT_FORALL_LOWER_PRECISION_FP") == LOWER_PRECISION
    assert listed("AT_FORALL_FP32") | SINCE_2_13 | OUTSIDE == FP32
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == FP32_SET_DTYPE
    assert listed("AT_FORALL_PROMOTE") == PROMOTE


def test_the_dispatcher_has_a_kernel_for_each_and_for_no_other() -> None:
    with_cuda = {"_cudnn_rnn"} if torch.version.cuda else set()
    fp32 = listed("AT_FORALL_FP32") | {name for name in OUTSIDE if hasattr(torch.ops.aten, name)}
    assert cuda_autocast_names() == LOWER_PRECISION | fp32 | FP32_SET_DTYPE | PROMOTE | ELSEWHERE | with_cuda
