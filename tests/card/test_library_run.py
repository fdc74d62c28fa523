"""Workspaces that cuDNN chooses, as a run on the card shows them, and those of the same operators in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.models.card import temporary_bytes
from memopt.device.cuda_libraries import library_run
from memopt.device.hardware import reported_chip
from memopt.device.op_call import describe
from tests.card.card import MB

aten = torch.ops.aten
CONVOLUTION = ([16, 16], [0, 0], [1, 1], False, [0, 0], 1)
UNSPLIT = MB
"""The most that the allocator adds to a request."""


def tensor(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda")


def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    images, weight, bias = tensor(64, 3, 224, 224), tensor(1024, 3, 16, 16), tensor(1024)
    gradient = tensor(64, 196, 1024).transpose(1, 2).view(64, 1024, 14, 14)
    mask = [False, True, True]
    return {
        "convolution": (aten.convolution.default, (images, weight, bias, *CONVOLUTION)),
        "backward": (aten.convolution_backward.default, (gradient, images, weight, [1024], *CONVOLUTION, mask)),
    }


@pytest.mark.parametrize("name", ["convolution", "backward"])
def test_a_run_shows_what_a_convolution_allocates(name: str) -> None:
    op, args = cases()[name]
    real = temporary_bytes(lambda: op(*args))
    made = op(*args)
    found = library_run(describe(op, args, {}, made), reported_chip(torch.device("cuda")))
    assert found is not None
    assert abs(found.workspace_bytes - real) <= UNSPLIT
    results = {"convolution": [0], "backward": [0, 1]}[name]
    assert [one.block for one in found.calls if one.allocates and one.block < 2] == results


ATTENTION = {
    "efficient": (
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
    ),
    "flash": (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_backward.default,
    ),
}


@pytest.mark.parametrize("kernel", list(ATTENTION))
def test_the_backward_of_attention_with_dropout_is_run(kernel: str) -> None:
    """Its seed lies on the host for one kernel: an address on the card in its place ended the process."""
    query, key, value, gradient = (tensor(2, 4, 128, 64) for _ in range(4))
    forward, backward = ATTENTION[kernel]
    if kernel == "efficient":
        out, sums, seed, offset = forward(query, key, value, None, True, 0.1)
        args: tuple[Any, ...] = (gradient, query, key, value, None, out, sums, seed, offset, 0.1, [True] * 3 + [False])
    else:
        out, sums, _, _, longest, longest_key, seed, offset, _ = forward(query, key, value, 0.1)
        args = (gradient, query, key, value, out, sums, None, None, longest, longest_key, 0.1, False, seed, offset)
    found = library_run(describe(backward, args, {}, backward(*args)), reported_chip(torch.device("cuda")))
    assert found is not None
