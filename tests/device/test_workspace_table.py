"""Estimates by rule: by name, by kind of operator, and for what no rule knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memopt.device.op_call import describe
from memopt.device.workspace import estimate_workspace
from passes.ops.offload_ops import COPY_BACK, COPY_OUT

aten = torch.ops.aten
X = torch.zeros(64, 64)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_views_and_fresh_tensors_hold_nothing(device: str) -> None:
    assert estimate_workspace(describe(aten.view.default, (X, [4096]), {}, X.view(4096)), device) == 0
    assert estimate_workspace(describe(aten.empty.memory_format, ([3],), {}, torch.empty(3)), device) == 0


def test_pointwise_operators_convert_on_the_cpu_only() -> None:
    call = describe(aten.add.Tensor, (X, X.double()), {}, X.double())
    assert estimate_workspace(call, "cuda") == 0
    assert estimate_workspace(call, "cpu") >= X.numel() * 8


@pytest.mark.parametrize("laid_out", [X, X.t()])
def test_copies_to_the_host_and_back_hold_nothing_beside_their_results(laid_out: torch.Tensor) -> None:
    out = describe(COPY_OUT, (laid_out,), {}, COPY_OUT(laid_out))
    back = describe(COPY_BACK, (laid_out, torch.device("cuda")), {}, laid_out)
    assert estimate_workspace(out, "cuda") == estimate_workspace(back, "cuda") == 0


def test_an_operator_without_a_rule_copies_all_its_tensors() -> None:
    result: Any = aten.linalg_inv_ex(torch.eye(64))
    call = describe(aten.linalg_inv_ex.default, (torch.eye(64),), {}, tuple(result))
    assert estimate_workspace(call, "cuda") >= 2 * X.nbytes


def test_16_bit_matmuls_may_sum_in_float32() -> None:
    half = X.bfloat16()
    call = describe(aten.mm.default, (half, half), {}, half)
    assert estimate_workspace(call, "cpu") >= X.nbytes
    assert estimate_workspace(call, "cuda") == 0
    assert estimate_workspace(describe(aten.mm.default, (X, X), {}, X), "cpu") == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_expert_of_transformers_hold_nothing_of_the_size_of_their_tensors(transposed: bool) -> None:
    pytest.importorskip("transformers.integrations.moe")  # makes the operators
    rows, ends = torch.empty(64, 128, device="meta"), torch.empty(2, device="meta", dtype=torch.int32)
    weight = torch.empty(2, 512, 128, device="meta").mT if transposed else torch.empty(2, 128, 512, device="meta")
    results = torch.empty(64, 512, device="meta")
    product, gradients = (
        torch.ops.transformers.grouped_mm_fallback.default,
        torch.ops.transformers.grouped_mm_fallback_backward.default,
    )
    forward = describe(product, (rows, weight, ends), {}, results)
    backward = describe(gradients, (rows, weight, ends, results), {}, (rows, weight))
    assert max(estimate_workspace(call, "cuda") for call in (forward, backward)) <= 1024**2
