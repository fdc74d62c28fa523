"""Every variant in the table computes the same bits as its operator, over the operand, and allocates nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memopt import measure_peak
from passes.graphs.op_kinds import inplace_variants, known_targets

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
@pytest.mark.parametrize("target", known_targets(), ids=str)
def test_variants(target: Any, dtype: torch.dtype) -> None:
    expected = target(*arguments(target, dtype))
    for variant in inplace_variants(target):
        given = arguments(target, dtype)
        places = [place for place, tensor in enumerate(given) if isinstance(tensor, Tensor) and tensor.dtype == dtype]
        places = [place for place in places if given[place].dim()] if variant.out else [0]
        assert places
        for place in places:
            given = arguments(target, dtype)
            options = {variant.out: given[place]} if variant.out else {}
            variant.target(*(tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in given), **options)
            given = arguments(target, dtype)
            options = {variant.out: given[place]} if variant.out else {}
            with measure_peak("cpu") as peak:
                result = variant.target(*given, **options)
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
    (variant,) = inplace_variants(target)
    generator = torch.Generator().manual_seed(0)
    gradient, values = (torch.randn(shape, generator=generator) for _ in range(2))
    forward = torch.softmax if name == ROWS[0] else torch.log_softmax
    result, gradient = forward(values, dim).to(dtype), gradient.to(dtype)
    expected = target(gradient, result, dim, dtype)
    over = variant.target(gradient, result, dim, dtype, **{variant.out: gradient})
    assert over.data_ptr() == gradient.data_ptr()
    assert torch.equal(bits(over), bits(expected))
