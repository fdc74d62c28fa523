"""CUDA's autocast applied to operators on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.compat.operators import cuda_autocast_names
from memopt.device.cuda import CUDA

aten = torch.ops.aten
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
wide, narrow, double = (torch.rand(4, 4).to(dtype) + 0.5 for dtype in (FP32, BF16, FP64))
labels = torch.tensor([0, 1, 2, 3])


def called(operator: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    kernel = CUDA.autocast_kernel(operator, BF16)
    assert kernel is not None
    result = kernel(*args, **kwargs)
    assert isinstance(result, torch.Tensor)
    return result


def test_the_16_bit_list_casts_down_all_but_doubles() -> None:
    assert called(aten.mm.default, wide, narrow).equal(wide.bfloat16() @ narrow)
    assert called(aten.mm.default, double, double).dtype == FP64


def test_the_fp32_list_casts_up_although_the_cpu_s_own_does_not() -> None:
    assert called(aten.exp.default, narrow).equal(narrow.float().exp())
    assert called(aten.layer_norm.default, narrow, [4]).dtype == FP32


def test_rms_norm_is_cast_only_by_a_torch_that_lists_it() -> None:
    kernel = CUDA.autocast_kernel(aten.rms_norm.default, BF16)
    listed = "rms_norm" in cuda_autocast_names()
    assert (kernel or aten.rms_norm.default)(narrow, [4]).dtype == (FP32 if listed else BF16)


@pytest.mark.parametrize(("dtype", "result"), [(None, FP32), (BF16, BF16), (FP64, FP64)])
def test_sums_are_in_fp32_unless_the_caller_names_a_dtype(dtype: torch.dtype | None, result: torch.dtype) -> None:
    assert called(aten.softmax.int, narrow, -1, dtype).dtype == result
    assert called(aten.sum.dim_IntList, narrow, [1], dtype=dtype).dtype == result


def test_a_softmax_of_doubles_stays_one() -> None:
    assert called(aten.softmax.int, double, -1).dtype == FP64


def test_mixed_operands_are_promoted() -> None:
    assert called(aten.addcmul.default, narrow, wide, narrow).dtype == FP32
    assert called(aten.addcmul.default, narrow, narrow, narrow).dtype == BF16


def test_a_composite_that_calls_a_listed_operator_is_decomposed() -> None:
    """The operators that it decomposes into are visible to a dispatch mode."""
    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **kwargs or {})

    with Record():
        called(aten.cross_entropy_loss.default, wide, labels)
    assert "cross_entropy_loss" not in seen
    assert any("log_softmax" in name for name in seen)


@pytest.mark.parametrize("operator", [aten.add.Tensor, aten.gelu.default, aten.view.default, aten.embedding.default])
def test_operators_outside_the_lists_are_left_alone(operator: Any) -> None:
    assert CUDA.autocast_kernel(operator, BF16) is None


def test_operators_outside_aten_are_left_alone() -> None:
    assert CUDA.autocast_kernel(torch.ops.prims.exp.default, BF16) is None
