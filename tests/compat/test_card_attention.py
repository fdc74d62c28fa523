"""Attention planned for a card that is not there keeps what the card's kernels keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.compat.card import CardAttention
from memopt.compat.fakes import FakeTensorMode

HEADS, ROWS, WIDTH = 4, 64, 32


def kernel(
    dtype: torch.dtype, major: int = 8, width: int = WIDTH, kind: str = "cpu", key_heads: int = HEADS, **options: Any
) -> str:
    """The name of the backward of attention; what it saves is no matrix of probabilities unless it is written out."""
    with FakeTensorMode(), CardAttention(major):
        query = torch.empty(2, HEADS, ROWS, width, dtype=dtype, device=kind, requires_grad=True)
        key = torch.empty(2, key_heads, ROWS, width, dtype=dtype, device=kind, requires_grad=True)
        found = F.scaled_dot_product_attention(query, key, key, **options)
        assert found.shape == query.shape
        found.sum().backward()
        assert query.grad is not None
        assert query.grad.shape == query.shape
        return str(found.grad_fn.name()) if found.grad_fn else ""


@pytest.mark.parametrize("kind", ["cpu", "meta"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_kernel_is_that_of_the_card(kind: str, dropout_p: float) -> None:
    options: dict[str, Any] = {"dropout_p": dropout_p, "kind": kind}
    assert "FlashAttention" in kernel(torch.bfloat16, **options)
    assert "FlashAttention" in kernel(torch.float16, is_causal=True, **options)
    assert "EfficientAttention" in kernel(torch.float32, **options)
    assert "EfficientAttention" in kernel(torch.float16, major=7, **options)
    assert "FlashAttention" in kernel(torch.bfloat16, key_heads=2, enable_gqa=True, **options)


def test_what_no_fused_kernel_takes_is_written_out() -> None:
    assert "Attention" not in kernel(torch.float32, width=30)
    assert "Attention" not in kernel(torch.float64)
    assert "Attention" not in kernel(torch.bfloat16, major=7)
    assert "Attention" not in kernel(torch.float32, key_heads=2, enable_gqa=True)
    assert "Slice" in kernel(torch.bfloat16, width=30), "of flash attention, whose heads are padded"


@pytest.mark.parametrize("columns", [ROWS, ROWS - 1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_is_given_to_the_memory_efficient_kernel(dtype: torch.dtype, columns: int) -> None:
    with FakeTensorMode(), CardAttention(9):
        query = torch.empty(2, HEADS, ROWS, WIDTH, requires_grad=True)
        key = torch.empty(2, HEADS, columns, WIDTH, requires_grad=True)
        mask = torch.ones(2, 1, ROWS, columns, dtype=dtype)
        found = F.scaled_dot_product_attention(query, key, key, attn_mask=mask, dropout_p=0.1)
        found.sum().backward()
    assert found.grad_fn is not None
    assert "EfficientAttention" in found.grad_fn.name()


def test_autocast_has_it_in_16_bits() -> None:
    with FakeTensorMode(), CardAttention(8), torch.autocast("cpu", torch.bfloat16):
        query = torch.empty(2, HEADS, ROWS, WIDTH, requires_grad=True)
        found = F.scaled_dot_product_attention(query, query, query)
    assert found.dtype is torch.bfloat16


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.project = nn.Linear(HEADS * 8, 3 * HEADS * 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(*x.shape[:2], 3, HEADS, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True).square().sum()


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_dropout_takes_no_memory_of_a_card(backend: Any) -> None:
    def peak(dropout: float) -> tuple[int, int]:
        batch = torch.zeros(4, 512, HEADS * 8)
        options: dict[str, Any] = {"precision": "bf16", "optimizer": None, "allow": {"recompute"}, "backend": backend}
        with torch.device("meta"):
            model = Attention(dropout)
        plan = memopt.plan(model, 4, (batch,), device="h100", **options)
        plain = next(row.peak_bytes for row in plan.receipt if row.lever == "plain step")
        return plan.predicted_peak_bytes, plain

    (with_it, plain_with_it), (without, plain_without) = peak(0.1), peak(0.0)
    assert with_it - without < 2**20, (with_it, without)
    assert plain_with_it - plain_without < 2**20, (plain_with_it, plain_without)
