"""Workspaces of operators on a card: what torch's allocator counts, beside the rules."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.models.card import temporary_bytes
from memopt.device.cuda import BLOCK_BYTES
from memopt.device.hardware import reported_chip
from memopt.device.op_call import describe
from memopt.device.workspace import estimate_workspace
from tests.card.card import MB, needs_numbers

aten = torch.ops.aten
UNSPLIT = MB
"""The most that torch's allocator adds to a large request, since it leaves no smaller rest of a block."""
Case = tuple[Any, tuple[Any, ...]]


def tensor(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


def checked(op: Any, args: tuple[Any, ...], **kwargs: Any) -> tuple[int, int]:
    """Bytes of an operator's temporaries: as the allocator counts them, and by rule."""
    real = temporary_bytes(lambda: op(*args, **kwargs))
    call = describe(op, args, kwargs, op(*args, **kwargs))
    return real, estimate_workspace(call, "cuda", reported_chip(torch.device("cuda")))


SIZES = (1, 2, 7, 8, 33, 64, 100, 197, 256, 768, 1024, 4096, 8192, 50257)


def reductions(seed: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Reductions of random tensors, of random layouts, over random dimensions."""
    choose = random.Random(seed)
    for _ in range(100):
        size = [choose.choice(SIZES) for _ in range(choose.randint(1, 4))]
        if torch.Size(size).numel() > 2**29:
            continue
        values = tensor(*size, dtype=choose.choice((torch.float32, torch.bfloat16, torch.float16)))
        if choose.random() < 0.4:
            values = values.permute(choose.sample(range(len(size)), len(size)))
        dims = sorted(choose.sample(range(len(size)), choose.randint(1, len(size))))
        ops: list[Case] = [
            (aten.sum.dim_IntList, (values, dims)),
            (aten.mean.dim, (values, dims)),
            (aten.amax.default, (values, dims)),
            (aten.argmax.default, (values, dims[0])),
            (aten.linalg_vector_norm.default, (values, 2, dims)),
            (aten.sum.default, (values,)),
        ]
        yield choose.choice(ops)


@pytest.mark.parametrize("seed", range(4))
def test_the_rule_for_reductions_is_what_torch_allocates(seed: int) -> None:
    for op, args in reductions(seed):
        real, rule = checked(op, args)
        assert real - UNSPLIT <= rule <= real + 4096 + real // 4, (
            op,
            args[0].shape,
            args[0].stride(),
            args[0].dtype,
            args[1:],
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(8192, 1024), (16384, 4096), (32768, 3072), (4096, 50304)])
def test_the_gradient_of_a_bias_is_counted_exactly(rows: int, columns: int, dtype: torch.dtype) -> None:
    real, rule = checked(aten.sum.dim_IntList, (tensor(rows, columns, dtype=dtype), [0], True))
    assert real - UNSPLIT <= rule <= real


def attention(dtype: torch.dtype, batch: int, heads: int, rows: int, width: int) -> Case:
    query = tensor(batch, rows, heads, width, dtype=dtype).transpose(1, 2)
    sums, seed = tensor(batch, heads, -(-rows // 32) * 32), torch.zeros((), dtype=torch.int64, device="cuda")
    wanted = [True, True, True, False]
    args = (query, query, query, query, None, query, sums, seed, seed, 0.0, wanted, True)
    return aten._scaled_dot_product_efficient_attention_backward.default, args


def norm_backward(dtype: torch.dtype, rows: int, columns: int, *, rms: bool = False) -> Case:
    values, sums, weight = tensor(rows, columns, dtype=dtype), tensor(rows, 1), tensor(columns, dtype=dtype)
    if rms:
        return aten._fused_rms_norm_backward.default, (values, values, [columns], sums, weight, [True, True])
    args = (values, values, [columns], sums, sums, weight, weight, [True, True, True])
    return aten.native_layer_norm_backward.default, args


def batch_norm(dtype: torch.dtype, seed: int, *, backward: bool) -> Case:
    """Batch normalisation of images of random sizes, in either layout."""
    choose = random.Random(seed)
    channels, side = choose.choice((3, 64, 96, 1000, 2048)), choose.choice((1, 7, 28, 112))
    images = tensor(choose.choice((2, 5, 32)), channels, side, side, dtype=dtype)
    images = images.contiguous(memory_format=choose.choice((torch.channels_last, torch.contiguous_format)))
    row = tensor(channels)
    if backward:
        args = (images, images, row, row, row, row, row, True, 1e-5, [True, True, True])
        return aten.native_batch_norm_backward.default, args
    return aten.native_batch_norm.default, (images, row, row, row, row, True, 0.1, 1e-5)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_rule_for_batch_normalisation_is_what_torch_allocates(seed: int, backward: bool) -> None:
    op, args = batch_norm(torch.bfloat16 if seed % 2 else torch.float32, seed, backward=backward)
    real, rule = checked(op, args)
    assert abs(rule - real) <= 4 * BLOCK_BYTES + UNSPLIT * (rule >= MB)


OPERATORS: dict[str, Callable[[torch.dtype], Case]] = {
    "mm": lambda dtype: (aten.mm.default, (tensor(8192, 1024, dtype=dtype), tensor(1024, 4096, dtype=dtype))),
    "mm of columns": lambda dtype: (
        aten.mm.default,
        (tensor(8192, 2048, dtype=dtype)[:, ::2], tensor(1024, 4096, dtype=dtype)),
    ),
    "mm transposed": lambda dtype: (
        aten.mm.default,
        (tensor(8192, 1024, dtype=dtype).t(), tensor(8192, 4096, dtype=dtype)),
    ),
    "softmax backward": lambda dtype: (
        aten._softmax_backward_data.default,
        (tensor(8, 16, 512, 512, dtype=dtype), tensor(8, 16, 512, 512, dtype=dtype), -1, dtype),
    ),
    "log softmax backward": lambda dtype: (
        aten._log_softmax_backward_data.default,
        (tensor(4096, 32000, dtype=dtype), tensor(4096, 32000, dtype=dtype), 1, dtype),
    ),
    "layer norm": lambda dtype: (
        aten.native_layer_norm.default,
        (tensor(8192, 1024, dtype=dtype), [1024], tensor(1024, dtype=dtype), tensor(1024, dtype=dtype), 1e-5),
    ),
    "layer norm backward": lambda dtype: norm_backward(dtype, 12608, 1024),
    "layer norm backward, many rows": lambda dtype: norm_backward(dtype, 131072, 768),
    "layer norm backward, many wide rows": lambda dtype: norm_backward(dtype, 70000, 4096),
    "rms norm backward, many rows": lambda dtype: norm_backward(dtype, 100000, 256, rms=True),
    "embedding backward": lambda dtype: (
        aten.embedding_dense_backward.default,
        (tensor(8, 1024, 1024, dtype=dtype), torch.zeros(8, 1024, dtype=torch.int64, device="cuda"), 32000, -1, True),
    ),
    "gather into rows": lambda dtype: (
        aten.index_put.default,
        (
            tensor(32000, 1024, dtype=dtype),
            [torch.zeros(8192, dtype=torch.int64, device="cuda")],
            tensor(8192, 1024, dtype=dtype),
            True,
        ),
    ),
    "attention backward": lambda dtype: attention(dtype, 8, 16, 1024, 64),
    "attention backward, few heads": lambda dtype: attention(dtype, 2, 12, 197, 64),
    "attention backward, wide heads": lambda dtype: attention(dtype, 4, 8, 1000, 80),
}

SIZED_BY_VALUES = ("embedding backward",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_numbers) if name in SIZED_BY_VALUES else name for name in OPERATORS],
)
def test_no_rule_is_under_what_torch_allocates(name: str, dtype: torch.dtype) -> None:
    op, args = OPERATORS[name](dtype)
    real, rule = checked(op, args)
    assert real - UNSPLIT <= rule <= 1.3 * real + 8 * MB
