from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt.compat import dynamo
from memopt.compat.dynamo import capture_settings, compile_with

Call = Callable[[Tensor, Tensor], Tensor]


def captured(call: Call) -> Call:
    """The call captured as one graph."""

    def backend(graph_module: Any, inputs: Any) -> Any:
        return graph_module.forward

    return compile_with(backend, call, whole=True)


def tile_of_rows(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(9, 20)
    torch.mm(x, y, out=buffer[:, 2:11])  # its kernel rounds by alignment
    return buffer.round(decimals=4)


def column_by_column(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(9, 9)
    result = torch.add(x, y, alpha=3, out=buffer.t())
    return buffer + result


def twice(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(9, 20)
    part = buffer[:, :9]
    torch.mul(x, y, out=part)
    torch.sub(part, x, out=part)
    return buffer + part.sum()


@pytest.mark.parametrize("call", [tile_of_rows, column_by_column, twice])
def test_parts_are_written_in_one_graph(call: Call) -> None:
    x, y = torch.rand(2, 9, 9)
    with capture_settings():
        assert torch.equal(captured(call)(x, y), call(x, y))


def other_dtype(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(9, 20, dtype=torch.float64)
    torch.mul(x, y, out=buffer[:, :9])
    return buffer


def other_shape(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(9, 20)
    torch.mul(x, y[:, :1], out=buffer[:, :5])
    return buffer


@pytest.mark.parametrize("call", [other_dtype, other_shape])
def test_what_is_converted_or_resized_is_left_to_dynamo(call: Call) -> None:
    x, y = torch.rand(2, 9, 9)
    with capture_settings(), pytest.raises(dynamo.DynamoError):
        captured(call)(x, y)


def test_gradients_are_refused_as_in_eager_mode() -> None:
    x, y = torch.rand(9, 9, requires_grad=True), torch.rand(9, 9)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        tile_of_rows(x, y)
    with capture_settings(), pytest.raises((dynamo.DynamoError, RuntimeError)):
        captured(tile_of_rows)(x, y)


def test_dynamo_is_as_before() -> None:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    before = TorchInGraphFunctionVariable.call_function
    with capture_settings():
        assert TorchInGraphFunctionVariable.call_function is not before
    assert TorchInGraphFunctionVariable.call_function is before
