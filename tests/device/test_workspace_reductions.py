"""The staging buffers of CUDA's reductions, as torch 2.11 allocates them on cards with the same multiprocessors."""

from __future__ import annotations

import pytest
import torch

from memopt.device.hardware import LARGE, Chip
from memopt.device.op_call import describe
from memopt.device.workspace import estimate_workspace
from memopt.device.workspace_reductions import reduction_bytes

aten = torch.ops.aten
MB = 1024**2
A100, RTX_4090, T4 = Chip(108, 2048), Chip(128, 1536), Chip(40, 1024)


def over_rows(rows: int, columns: int, dtype: torch.dtype = torch.float32, chip: Chip = LARGE) -> int:
    values = torch.empty(rows, columns, dtype=dtype, device="meta")
    sums = aten.sum.dim_IntList(values, [0], True, dtype=torch.float32)
    return reduction_bytes(describe(aten.sum.dim_IntList, (values, [0], True), {"dtype": torch.float32}, sums), chip)


@pytest.mark.parametrize(
    ("rows", "columns", "megabytes"),
    [(256, 4096, 0), (1024, 1024, 8), (8192, 4096, 132), (8192, 50257, 0), (32768, 64, 4), (32768, 32768, 256)],
)
def test_a_sum_over_rows_stages_its_parts(rows: int, columns: int, megabytes: int) -> None:
    assert over_rows(rows, columns) // MB == megabytes


def test_a_sum_of_half_the_bytes_is_split_into_fewer_pieces() -> None:
    assert over_rows(32768, 32768, torch.bfloat16) // MB == 512


@pytest.mark.parametrize(("chip", "parts"), [(A100, 54), (LARGE, 66), (RTX_4090, 48), (T4, 10)])
def test_the_parts_are_as_many_as_the_card_runs_at_once(chip: Chip, parts: int) -> None:
    grid = 4096 // 4 // 32
    assert over_rows(8192, 4096, chip=chip) == 4 * 4096 * parts * 32 * 4 + -(-4 * grid // 512) * 512


def test_a_sum_along_rows_stages_next_to_nothing() -> None:
    values = torch.empty(8, 2**20, device="meta")
    call = describe(aten.sum.dim_IntList, (values, [1]), {}, values.sum(1))
    assert 0 < reduction_bytes(call, LARGE) < MB // 16


def test_results_in_16_bits_are_gathered_apart_where_offsets_outgrow_32_bits() -> None:
    values = torch.empty(65536, 32768, dtype=torch.bfloat16, device="meta")
    call = describe(aten.sum.dim_IntList, (values, [1]), {}, values.sum(1))
    assert reduction_bytes(call, LARGE) >= 4 * 65536


def test_the_backward_of_softmax_holds_the_product_of_gradient_and_result() -> None:
    values = torch.empty(8, 16, 512, 512, device="meta")
    call = describe(aten._softmax_backward_data.default, (values, values, -1, torch.float32), {}, values)
    assert estimate_workspace(call, "cuda") == values.nbytes
    assert estimate_workspace(call, "cpu") == 0


def test_matrices_without_contiguous_rows_or_columns_are_copied() -> None:
    weight, wide = torch.empty(1024, 4096, device="meta"), torch.empty(8192, 2048, device="meta")

    def of(left: torch.Tensor) -> int:
        return estimate_workspace(describe(aten.mm.default, (left, weight), {}, left @ weight), "cuda")

    assert of(wide[:, ::2]) == 4 * 8192 * 1024
    assert of(wide[:, :1024]) == 0
    assert of(torch.empty(1024, 8192, device="meta").t()) == 0


def test_attention_backward_copies_no_transposed_heads() -> None:
    query = torch.empty(8, 1024, 16, 64, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    sums = torch.empty(8, 16, 1024, device="meta")
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    call = describe(op, (query, query, query, query, query, sums, 0.0, True), {}, (query, query, query))
    assert estimate_workspace(call, "cuda") < 1.1 * 4 * query.numel()
