"""A corrected fake mode lays results out as kernels do, and keeps all other fakes as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from memopt.compat.fakes import FakeTensorMode, new_fake_mode, to_fake
from memopt.compat.operators import tree_leaves
from memopt.compat.true_results import correct_strides

aten = torch.ops.aten
WIDE = torch.randn(12, 16, 9)
TURNED = torch.randn(12, 9, 16).transpose(1, 2)
ONES = torch.ones(16)


def normalised(x: Tensor) -> Any:
    return aten._native_batch_norm_legit_functional(x, ONES, ONES, ONES, ONES, True, 0.1, 1e-5)


def softplus_backward(x: Tensor) -> Any:
    return aten.softplus_backward(x, WIDE, 1, 20)


def layer_norm(x: Tensor) -> Any:
    return aten.native_layer_norm(x, [9], None, None, 1e-5)


def summed(x: Tensor) -> Any:
    return aten.sum.dim_IntList(x, [0], True)


def fake(call: Callable[[Tensor], Any], x: Tensor, mode: FakeTensorMode) -> list[Tensor]:
    mode.allow_non_fake_inputs = True
    value = to_fake(mode, x, torch.device("cpu"))
    with mode:
        return [leaf for leaf in tree_leaves(call(value)) if isinstance(leaf, Tensor)]


def normalised_backward(x: Tensor) -> Any:
    return aten.native_batch_norm_backward(x, x, ONES, ONES, ONES, ONES, ONES, True, 1e-5, [True, True, True])


@pytest.mark.parametrize("call", [normalised, softplus_backward, layer_norm, summed, torch.sin, torch.clone])
@pytest.mark.parametrize(
    "x", [WIDE, TURNED, TURNED[:, ::2], WIDE[:1].expand(12, 16, 9)], ids=["wide", "turned", "gaps", "rows"]
)
def test_strides_are_those_of_the_kernel(call: Callable[[Tensor], Any], x: Tensor) -> None:
    if x.shape[1] == 8 and call in (normalised, softplus_backward):
        pytest.skip("the other operands have 16 columns")
    mode = new_fake_mode()
    correct_strides(mode)
    for _ in range(2):
        for found, real in zip(fake(call, x, mode), tree_leaves(call(x)), strict=True):
            assert found.shape == real.shape
            assert found.stride() == real.stride()
            assert found.dtype == real.dtype


@pytest.mark.parametrize("call", [normalised, softplus_backward, layer_norm, summed])
@pytest.mark.parametrize("x", [WIDE, TURNED], ids=["wide", "turned"])
def test_strides_are_those_of_the_kernel_where_the_rows_are_a_symbol(call: Callable[[Tensor], Any], x: Tensor) -> None:
    mode = new_fake_mode()
    correct_strides(mode)
    mode.allow_non_fake_inputs = True
    assert mode.shape_env is not None
    symbols = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC])
    value = mode.from_tensor(x, symbolic_context=symbols, source=ConstantSource("x"))
    with mode:
        results = [leaf for leaf in tree_leaves(call(value)) if isinstance(leaf, Tensor)]
    for found, real in zip(results, tree_leaves(call(x)), strict=True):
        assert [int(size) for size in found.stride()] == list(real.stride())


@pytest.mark.parametrize("call", [normalised, normalised_backward, softplus_backward])
@pytest.mark.parametrize("x", [WIDE.bfloat16(), TURNED.bfloat16()], ids=["wide", "turned"])
def test_dtypes_are_those_of_the_kernel_where_operands_have_two(call: Callable[[Tensor], Any], x: Tensor) -> None:
    test_strides_are_those_of_the_kernel(call, x)


def test_an_operator_with_a_workspace_is_not_tried() -> None:
    layer, x = torch.nn.LSTM(4, 4, batch_first=True), torch.randn(2, 3, 4)

    def gradient(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(layer(x)[0].sum(), x)[0]

    mode = new_fake_mode()
    correct_strides(mode)
    assert fake(gradient, x, mode)[0].shape == x.shape  # with made-up operands, the process would end


def test_torch_itself_takes_another_layout() -> None:
    (found, *_), (real, *_) = fake(normalised, TURNED, new_fake_mode()), normalised(TURNED)
    assert found.stride() != real.stride(), "torch has mended it: this module may go"


def test_strides_that_depend_on_data_are_left_alone() -> None:
    mode = new_fake_mode()
    correct_strides(mode)
    assert mode.shape_env is not None
    step = mode.shape_env.create_unbacked_symint()
    with mode:
        column = torch.empty_strided((12, 9), (step, 1))
        result = aten.softplus(column)
    assert result.shape == (12, 9)
