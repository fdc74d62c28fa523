"""Operators without a kernel for 16 bits are found on fakes, and no others are taken for such."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memopt.compat.fakes import new_fake_mode
from memopt.compat.true_results import raising_for_refused_dtypes

REFUSED = [
    lambda x: torch.complex(x, x),
    lambda x: torch.cdist(x, x, p=1),
    lambda x: torch.linalg.inv(x.T @ x),
]
TAKEN = [
    lambda x: x @ x.T,
    lambda x: nn.functional.cross_entropy(x, x.argmax(1)),
    lambda x: nn.functional.dropout(x, 0.5).softmax(-1),
    lambda x: torch.complex(x.float(), x.float()),
    lambda x: x.view(4, 16, 8).sum(0)[x.new_ones(3, dtype=torch.long)],
]


def run(function: Any, dtype: torch.dtype) -> None:
    with new_fake_mode(), raising_for_refused_dtypes():
        function(torch.empty(64, 8, dtype=dtype))


@pytest.mark.parametrize("function", REFUSED)
def test_operators_without_a_kernel_raise(function: Any) -> None:
    run(function, torch.float32)
    with pytest.raises(RuntimeError):
        run(function, torch.bfloat16)


@pytest.mark.parametrize("function", TAKEN)
def test_others_do_not_and_draw_no_random_number(function: Any) -> None:
    before = torch.get_rng_state()
    run(function, torch.bfloat16)
    assert torch.equal(before, torch.get_rng_state())
