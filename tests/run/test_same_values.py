"""Values of two graphs of one region, matched whatever the order of operators that do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.run.executable import _Value, names_in, values_of

Region = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def values(region: Region, rows: int, width: int = 8) -> tuple[_Value, ...]:
    inputs = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width, width)
    joint: Any = SimpleNamespace(module=make_fx(region, tracing_mode="fake")(*inputs))
    return values_of(joint)


def weight_first(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    low = gradient.bfloat16()
    of_weight = low.t() @ x.bfloat16()
    return (low @ weight.bfloat16()).float(), of_weight.float()


def input_first(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    low = gradient.bfloat16()
    of_input = low @ weight.bfloat16()
    return of_input.float(), (low.t() @ x.bfloat16()).float()


def halves(first: int) -> Region:
    def region(gradient: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        parts = torch.ops.aten.split_with_sizes_copy(x, [4, 4], 1)
        return parts[first].exp(), parts[1 - first].exp().sin()

    return region


def test_the_same_operators_in_another_order() -> None:
    planned, ours = values(weight_first, 64), values(input_first, 1)
    names = names_in(ours, planned)
    assert names is not None
    places = {value.name: value for value in ours}
    assert all(places[names[value.name]].computation == value.computation for value in planned)
    assert [value.name for value in planned] != list(names.values())
    assert set(names.values()) == places.keys()


def test_results_of_one_operator_are_not_each_other() -> None:
    names = names_in(values(halves(1), 4), values(halves(0), 4))
    assert names is None


def test_larger_or_other_values_are_not_the_same() -> None:
    planned = values(weight_first, 64)
    assert names_in(values(weight_first, 65), planned) is None
    assert names_in(values(halves(0), 4), planned) is None
    assert names_in(values(weight_first, 64)[:-1], planned) is None
