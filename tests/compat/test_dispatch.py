from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memopt.compat.operators import (
    TorchDispatchMode,
    autocast_kernel,
    composite_kernel,
    kernels_as_in_eager_mode,
    plain_tensors,
    without_autocast,
    without_torch_functions,
)

aten = torch.ops.aten


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a subclass saw the call")


def test_plain_tensors_are_seen_by_no_dispatch_mode_and_no_subclass() -> None:
    tensor = torch.ones(2).as_subclass(Loud)
    with Operators() as operators:
        with plain_tensors():
            tensor + 1
        assert operators.names == []
        with pytest.raises(AssertionError, match="a subclass saw the call"):
            tensor + 1
        torch.ones(2) + 1
    assert operators.names == ["aten::ones", "aten::add.Tensor"]


def test_without_torch_functions_operators_are_still_seen() -> None:
    with Functions() as functions, Operators() as operators, without_torch_functions():
        torch.ones(2) + 1
    assert functions.count == 0
    assert operators.names == ["aten::ones", "aten::add.Tensor"]


def test_without_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_autocast_kernel() -> None:
    assert autocast_kernel(aten.relu.default, "cpu") is None
    product = autocast_kernel(aten.mm.default, "cpu")
    assert product is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert product(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


def test_composite_kernel() -> None:
    assert composite_kernel(aten.mm.default) is None
    linear = composite_kernel(aten.linear.default)
    assert linear is not None
    x, weight = torch.ones(2, 2), torch.ones(2, 2)
    with Operators() as operators:
        linear(x, weight)
    assert operators.names == ["aten::t", "aten::mm"]


class InEagerMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with kernels_as_in_eager_mode():
            return func(*args, **(kwargs or {}))


def test_kernels_under_a_mode_see_conjugates() -> None:
    values = torch.randn(8, 5, dtype=torch.complex64)
    plain = torch.linalg.pinv(values)
    with Operators():
        assert not torch.allclose(torch.linalg.pinv(values), plain), "torch has mended it"
    with InEagerMode():
        assert torch.equal(torch.linalg.pinv(values), plain)
