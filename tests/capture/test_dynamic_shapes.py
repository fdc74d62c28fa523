"""Sizes that the user declares to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from memopt.capture.inputs import at_largest, declared_sizes


class Takes(nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None: ...


IDS, MASK = torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 16)
CALL: Any = ((IDS,), {"mask": MASK})
LENGTH = Dim("length", max=64)


def sizes(dynamic: Any, call: Any = CALL, *, with_targets: bool = False) -> Any:
    return declared_sizes(dynamic, call, Takes(), with_targets=with_targets)


def test_by_name_and_by_position() -> None:
    assert sizes(None) == {}
    assert sizes({"ids": {1: LENGTH}, "mask": {0: Dim.DYNAMIC, -1: LENGTH}}) == {(0, 1): 64, (1, 0): None, (1, 1): 64}
    assert sizes(({1: LENGTH},)) == {(0, 1): 64}
    assert sizes({"ids": (None, Dim.AUTO), "mask": (4, Dim.STATIC)}) == {(0, 1): None}
    pair = (({"ids": IDS}, MASK), {})
    assert sizes(({"ids": {1: LENGTH}}, {1: LENGTH}), pair, with_targets=True) == {(0, 1): 64, (1, 1): 64}


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"idz": {1: LENGTH}}, "names 'idz', which is not in the batch; it has 'ids', 'mask'"),
        ({"ids": {2: LENGTH}}, r"dynamic\['ids'\] names dimension 2 of a tensor of shape \(4, 16\)"),
        ({"ids": {1: Dim("length", max=8)}}, r"is at most 8, but the batch has 16"),
        (7, "must be nested like the batch"),
        ({"ids": LENGTH}, r"dynamic\['ids'\] must name dimensions, .*not Dim\('length'"),
        ({"ids": "length"}, r"dynamic\['ids'\] must name dimensions, .*not 'length'"),
        ({"ids": 5}, r"dynamic\['ids'\] must name dimensions, .*not 5"),
        ({"ids": {0: "n"}}, r"dynamic\['ids'\]\[0\] must be a torch.export.Dim, .*not 'n'"),
        ({"ids": (None, 2.5)}, r"dynamic\['ids'\]\[1\] must be a torch.export.Dim, .*not 2.5"),
    ],
)
def test_what_does_not_fit_the_batch_is_refused(dynamic: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sizes(dynamic)


def test_the_largest_call() -> None:
    args, kwargs = at_largest(CALL, {(0, 1): 64, (1, 0): None, (1, 1): 64})
    assert args[0].shape == kwargs["mask"].shape == (4, 64)
    assert args[0].is_meta
    assert at_largest(CALL, {(0, 1): None}) is CALL
