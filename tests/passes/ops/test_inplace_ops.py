"""Every variant in the table computes the same bits as its operator, over the operand, and allocates nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memopt import measure_peak
from passes.ops.inplace_ops import inplace_variants, known_targets

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
        places = [place for place, each in enumerate(given) if isinstance(each, Tensor) and each.dtype == dtype]
        places = [place for place in places if given[place].dim()] if variant.out else [0]
        assert places
        for place in places:
            given = arguments(target, dtype)
            options = {variant.out: given[place]} if variant.out else {}
            variant.target(*(each.clone() if isinstance(each, Tensor) else each for each in given), **options)
            given = arguments(target, dtype)
            options = {variant.out: given[place]} if variant.out else {}
            with measure_peak("cpu") as peak:
                result = variant.target(*given, **options)
            assert result.data_ptr() == given[place].data_ptr()
            assert result.dtype == expected.dtype
            assert torch.equal(bits(result), bits(expected))
            assert peak.allocated_bytes < expected.nbytes
