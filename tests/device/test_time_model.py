from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from memopt.device.hardware import Hardware
from memopt.device.time_model import node_bytes, node_flops, node_seconds, op_seconds

PLAIN = Hardware("plain", {"float32": 1e3}, 1e2, 0.5, 0, "made up", flops_efficiency=1.0, bandwidth_efficiency=1.0)


def nodes(function: Callable[..., Any], *inputs: Tensor) -> dict[str, fx.Node]:
    """The call nodes of the traced function by their op's name, the last where several share one."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return {str(getattr(node.target, "overloadpacket", node.target)): node for node in graph.nodes if node.args}


def test_op_seconds_is_the_longest_of_three() -> None:
    assert op_seconds(5_000, 100, "float32", PLAIN) == 5.0
    assert op_seconds(100, 700, "float32", PLAIN) == 7.0
    assert op_seconds(1, 1, "float32", PLAIN) == 0.5


def test_what_is_small_moves_at_the_rate_of_the_cache() -> None:
    cached = replace(PLAIN, cached_bytes=700, cached_bytes_per_second=2 * PLAIN.bytes_per_second)
    assert op_seconds(0, 700, "float32", cached) == 3.5
    assert op_seconds(0, 800, "float32", cached) == 8.0


def test_what_passes_between_kernels_adds() -> None:
    waiting = replace(PLAIN, between_seconds=0.25)
    assert op_seconds(5_000, 100, "float32", waiting) == 0.25 + 0.5 + 5.0
    assert op_seconds(0, 0, "float32", waiting) == 0.75


def test_op_seconds_takes_off_what_kernels_do_not_reach() -> None:
    half = Hardware("half", {"float32": 1e3}, 1e2, 0.5, 0, "made up", flops_efficiency=0.5, bandwidth_efficiency=0.5)
    assert op_seconds(5_000, 0, "float32", half) == 10.0
    assert op_seconds(0, 500, "float32", half) == 10.0


def test_matmuls() -> None:
    made = nodes(lambda a, b, c: (torch.mm(a, b), torch.addmm(c, a, b)), *map(torch.ones, [(4, 8), (8, 16), (4, 16)]))
    assert node_flops(made["aten.mm"]) == node_flops(made["aten.addmm"]) == 2 * 4 * 8 * 16
    assert node_bytes(made["aten.mm"]) == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    batched = nodes(
        lambda a, b, c: (torch.bmm(a, b), torch.baddbmm(c, a, b)), *map(torch.ones, [(3, 4, 8), (3, 8, 2), (3, 4, 2)])
    )
    assert node_flops(batched["aten.bmm"]) == node_flops(batched["aten.baddbmm"]) == 2 * 3 * 4 * 8 * 2


@pytest.mark.parametrize("groups", [1, 8])
def test_each_gradient_of_a_convolution_costs_what_its_forward_costs(groups: int) -> None:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.conv2d(x, weight, padding=1, groups=groups).sum(), (x, weight))

    x, weight = torch.ones(2, 8, 6, 6, requires_grad=True), torch.ones(8, 8 // groups, 3, 3, requires_grad=True)
    made = nodes(step, x, weight)
    forward = 2 * 2 * 6 * 6 * 8 * (8 // groups) * 9
    assert node_flops(made["aten.convolution"]) == forward
    assert node_flops(made["aten.convolution_backward"]) == 2 * forward


@pytest.mark.parametrize("groups", [3, 1])
def test_attention_on_the_cpu(groups: int) -> None:
    """Heads that share keys and values multiply as much as others."""

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum(), (q, k, v))

    made = nodes(step, *(torch.ones(2, heads, 8, 4, requires_grad=True) for heads in (3, groups, groups)))
    product = 2 * 2 * 3 * 8 * 8 * 4
    assert node_flops(made["aten._scaled_dot_product_flash_attention_for_cpu"]) == 2 * product
    assert node_flops(made["aten._scaled_dot_product_flash_attention_for_cpu_backward"]) == 5 * product


def test_grouped_matmul_counts_each_row_for_its_own_group() -> None:
    made = nodes(
        lambda x, weight, ends: torch._grouped_mm(x, weight, offs=ends),
        torch.ones(16, 32, dtype=torch.bfloat16),
        torch.ones(2, 32, 64, dtype=torch.bfloat16),
        torch.tensor([4, 16], dtype=torch.int32),
    )
    assert node_flops(made["aten._grouped_mm"]) == 2 * 16 * 32 * 64


def test_elementwise_ops_have_bytes_only() -> None:
    made = nodes(lambda x, y: x + y, torch.ones(8, 8), torch.ones(8, 8))["aten.add"]
    assert node_flops(made) == 0
    assert node_bytes(made) == 3 * 8 * 8 * 4


def test_expanded_input_counts_by_what_lies_in_memory() -> None:
    made = nodes(lambda x, row: x + row.expand(64, 8), torch.ones(64, 8), torch.ones(8))
    assert node_bytes(made["aten.add"]) == 4 * (2 * 64 * 8 + 8)


def test_slice_of_a_large_tensor_counts_by_the_slice() -> None:
    made = nodes(lambda x: x[:2] * 2, torch.ones(64, 8))
    assert node_bytes(made["aten.mul"]) == 2 * 2 * 8 * 4


def test_views_take_no_time() -> None:
    made = nodes(lambda x: x.view(4, 16).t().unsqueeze(0).expand(3, 16, 4) + 1, torch.ones(8, 8))
    for view in ("aten.view", "aten.t", "aten.unsqueeze", "aten.expand"):
        assert node_bytes(made[view]) == node_flops(made[view]) == 0
        assert node_seconds(made[view], PLAIN) == 0.0
    assert node_seconds(made["aten.add"], PLAIN) == (64 + 192) * 4 / 100


def test_elements_of_a_tuple_take_no_time() -> None:
    made = nodes(lambda x: torch.max(x, dim=0)[0], torch.ones(8, 8))
    assert node_seconds(made["<built-in function getitem>"], PLAIN) == 0.0
    assert node_bytes(made["aten.max"]) == 4 * 64 + 8 * (4 + 8)


def test_in_place_op_takes_time_although_its_result_is_an_alias() -> None:
    made = nodes(lambda x: x.clone().mul_(2), torch.ones(8, 8))
    assert node_bytes(made["aten.mul_"]) == 2 * 8 * 8 * 4


def test_embedding_reads_the_rows_that_it_returns() -> None:
    made = nodes(lambda table, rows: F.embedding(rows, table), torch.ones(1000, 8), torch.zeros(5, dtype=torch.int64))
    assert node_bytes(made["aten.embedding"]) == 2 * 5 * 8 * 4 + 5 * 8


def test_filling_reads_nothing() -> None:
    made = nodes(lambda x: torch.zeros_like(x) + x, torch.ones(8, 8))
    assert node_bytes(made["aten.zeros_like"]) == 8 * 8 * 4


def test_sixteen_bits_run_at_their_own_rate() -> None:
    fast = Hardware("fast", {"float32": 1e3, "bfloat16": 1e4}, 1e9, 0.0, 0, "made up", 1.0, 1.0)
    a = torch.ones(32, 32)
    single, half = (nodes(torch.mm, x, x)["aten.mm"] for x in (a, a.bfloat16()))
    assert node_seconds(single, fast) == pytest.approx(10 * node_seconds(half, fast))


def test_products_of_sixteen_bits_are_slow_on_a_card_where_rows_are_not_aligned() -> None:
    fast = Hardware("fast", {"float32": 1e3, "bfloat16": 1e3}, 1e9, 0.0, 0, "made up", 1.0, 1.0)
    cpu = replace(fast, device_type="cpu")
    a, aligned, other = torch.ones(32, 32), torch.ones(32, 48), torch.ones(32, 49)
    for dtype, on, slower in ((torch.bfloat16, fast, 5.0), (torch.bfloat16, cpu, 1.0), (torch.float32, fast, 1.0)):
        first, second = (
            node_seconds(nodes(torch.mm, a.to(dtype), b.to(dtype))["aten.mm"], on) / b.shape[1]
            for b in (aligned, other)
        )
        assert second / first == pytest.approx(slower)


@pytest.mark.parametrize(("op", "before"), [(torch.ops.aten.mm.dtype, ()), (torch.ops.aten.addmm.dtype, ((4, 16),))])
def test_flops_of_matmuls_into_another_dtype(op: Any, before: tuple[tuple[int, int], ...]) -> None:
    graph = fx.Graph()
    operands = [graph.placeholder(f"x{at}") for at in range(len(before) + 2)]
    for operand, size in zip(operands, (*before, (4, 8), (8, 16)), strict=True):
        operand.meta["val"] = torch.empty(size, dtype=torch.bfloat16, device="meta")
    node = graph.call_function(op, (*operands, torch.float32))
    node.meta["val"] = torch.empty(4, 16, device="meta")
    assert node_flops(node) == 2 * 4 * 8 * 16
