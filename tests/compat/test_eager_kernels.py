"""Within the context, operators are traced by eager mode's kernels, unless their sizes are symbols."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from memopt.compat.eager_mode import _rounds_alike, eager_kernels
from memopt.meter import measure_peak

aten = torch.ops.aten


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


def test_symbolic_sizes_are_left_to_torch() -> None:
    x = torch.randn(2, 3, 4, 6)
    with eager_kernels():
        assert aten.upsample_bilinear2d_backward.default not in differentiated(bilinear, x, "symbolic")


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
