"""Within the context, operators are traced by eager mode's kernels, also where sizes are symbols that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from memopt.compat.eager_mode import _rounds_alike, eager_kernels
from memopt.meter import measure_peak

aten = torch.ops.aten

RESIZING = {"linear": 1, "bilinear": 2, "trilinear": 3, "bicubic": 2, "nearest": 2, "nearest-exact": 3}


def bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3)


def differentiated(call: Callable[[Tensor], Tensor], x: Tensor, mode: str = "fake") -> set[object]:
    """The operators of a call and of its gradient, as they are traced."""

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(call(x).sum(), x)[0]

    with enable_python_dispatcher():
        graph = make_fx(step, tracing_mode=mode)(x.requires_grad_()).graph
    return {node.target for node in graph.nodes}


def test_interpolation_is_one_operator_and_its_backward_another() -> None:
    x = torch.randn(1, 2, 4, 4)
    plain = differentiated(bilinear, x)
    with eager_kernels():
        found = differentiated(bilinear, x)
    assert {aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d_backward.default} & found
    assert aten.upsample_bilinear2d_backward.default in found
    assert aten.upsample_bilinear2d_backward.default not in plain
    assert differentiated(bilinear, x) == plain, "the context leaves everything as it was"


@pytest.mark.parametrize("size", [{"scale_factor": 2}, {"scale_factor": 1.3}, {"size": 9}], ids=str)
@pytest.mark.parametrize("mode", RESIZING)
def test_resizing_has_eager_modes_bits_and_layout_with_symbolic_sizes(mode: str, size: dict[str, Any]) -> None:
    dims = RESIZING[mode]

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.interpolate(x * 2, **size, mode=mode)
        return y, torch.autograd.grad((y * y).sum(), x)[0]

    x = torch.randn(2, 3, *range(5, 5 + dims)).requires_grad_()
    with eager_kernels(), enable_python_dispatcher():
        traced = make_fx(step, tracing_mode="symbolic")(x)
    for other in (x, torch.randn(4, 3, *x.shape[2:]).requires_grad_()):
        for ours, eager in zip(traced(other), step(other), strict=True):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()
    for node in traced.graph.nodes:
        if "upsample" in str(node.target):
            assert node.meta["val"].is_contiguous()


@pytest.mark.parametrize("mode", [mode for mode, dims in RESIZING.items() if dims > 1])
def test_a_resized_gradient_has_the_memory_format_of_eager_modes(mode: str) -> None:
    dims = RESIZING[mode]
    format = torch.channels_last if dims == 2 else torch.channels_last_3d

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        return torch.autograd.grad((F.interpolate(x, scale_factor=2, mode=mode) * weight).sum(), x)[0]

    x = torch.randn(2, 3, *range(4, 4 + dims)).to(memory_format=format).requires_grad_()
    weight = torch.randn(2, 3, *(2 * size for size in x.shape[2:])).to(memory_format=format)
    with eager_kernels(), enable_python_dispatcher():
        traced = make_fx(gradient, tracing_mode="symbolic")(x, weight)
    (made,) = next(reversed(traced.graph.nodes)).all_input_nodes
    eager = gradient(x, weight)
    assert torch.equal(traced(x, weight), eager)
    for layout in (format, torch.contiguous_format):
        assert made.meta["val"].is_contiguous(memory_format=layout) == eager.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(("dtype", "native"), [(torch.float32, True), (torch.bfloat16, False)], ids=str)
def test_the_backward_of_dropout_is_native_where_that_rounds_alike(dtype: torch.dtype, native: bool, mode: str) -> None:
    with eager_kernels():
        found = differentiated(dropped, torch.randn(4, 4, dtype=dtype), mode)
    assert aten.native_dropout.default in found, "a mask of one byte an element"
    assert (aten.native_dropout_backward.default in found) is native


def test_dropout_that_drops_nothing_is_its_input() -> None:
    x = torch.randn(4)
    with eager_kernels(), enable_python_dispatcher():
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert not F.dropout(x, 1.0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_dropout_rounds_is_tried_in_little_memory(dtype: torch.dtype) -> None:
    _rounds_alike.cache_clear()
    with measure_peak("cpu") as peak:
        _rounds_alike(0.1, dtype)
    assert peak.allocated_bytes < 256 * 1024
