"""The blocks that an operator written in Python allocates on a card, without a card."""

from __future__ import annotations

import pytest
import torch

from memopt.device.hardware import LARGE
from memopt.device.op_call import OpCall, describe
from memopt.device.workspace import estimate_workspace, op_dry_run
from passes.ops.linear_cross_entropy import weight_gradient, with_gradients
from passes.ops.linear_rows import chunk_rows

BLOCK, MB = 512, 1024**2
ROWS, WIDTH, CLASSES = 2048, 256, 8192
BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = {
    "mean": ("mean", -100, 0.0, 1.0, 0.0, 0),
    "softcap": ("mean", -100, 0.0, 1.0, 30.0, 0),
    "smoothing": ("sum", -100, 0.1, 1.0, 0.0, 0),
    "chunks of 100": ("mean", -100, 0.0, 1.0, 0.0, 100),
}


def loss_call(options: str = "mean", dtypes: tuple[torch.dtype, torch.dtype] = (BF16, FP32)) -> OpCall:
    hidden = torch.empty(ROWS, WIDTH, dtype=dtypes[0], device="meta")
    weight = torch.empty(CLASSES, WIDTH, dtype=dtypes[1], device="meta")
    target = torch.empty(ROWS, dtype=torch.int64, device="meta")
    arguments = (hidden, weight, None, target, None, *OPTIONS[options], True, True, False, False)
    operator = torch.ops.memopt.linear_cross_entropy_with_gradients.default
    return describe(operator, arguments, {}, with_gradients(*arguments))


def test_blocks_of_a_chunked_loss_in_order() -> None:
    """The weight in the dtype of its input, both gradients, and chunk by chunk the logits in two dtypes, and their
    gradient in the narrow one; then the loss and what it is divided by."""
    dry_run = op_dry_run(loss_call(), "cuda", LARGE)
    assert dry_run is not None
    cast, of_hidden, of_weight = 2 * WIDTH * CLASSES, 2 * WIDTH * ROWS, 4 * WIDTH * CLASSES
    rows = chunk_rows(ROWS, WIDTH)
    narrow = 2 * CLASSES * rows
    chunk = [narrow, 2 * narrow, -narrow, narrow, -narrow, -2 * narrow]
    expected = [cast, of_hidden, of_weight, *(ROWS // rows) * chunk, BLOCK, BLOCK, -cast]
    assert [call.bytes if call.allocates else -call.bytes for call in dry_run.calls] == expected
    assert [call.block for call in dry_run.calls[1:3]] == [2, 3]  # the results' numbers
    small = dry_run.workspace_bytes - (cast + 3 * narrow)
    assert 0 <= small <= 64 * ROWS


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (BF16, BF16), (FP32, FP32), (torch.float16, FP32)])
@pytest.mark.parametrize("options", OPTIONS)
def test_workspaces_are_freed_and_are_at_most_those_of_the_rule(
    options: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    call = loss_call(options, dtypes)
    dry_run = op_dry_run(call, "cuda", LARGE)
    assert dry_run is not None
    allocated = {one.block for one in dry_run.calls if one.allocates and one.block >= len(call.outputs)}
    freed = [one.block for one in dry_run.calls if not one.allocates]
    assert allocated == set(freed)
    assert len(freed) == len(set(freed))
    assert 0 < dry_run.workspace_bytes <= estimate_workspace(call, "cuda")


def test_the_weight_gradient_in_the_backward() -> None:
    hidden, weight = torch.empty(ROWS, WIDTH, device="meta"), torch.empty(CLASSES, WIDTH, device="meta")
    target, factor = torch.empty(ROWS, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
    arguments = (hidden, weight, None, target, None, factor, -100, 0.0, 1.0, 0.0, 0, True, False)
    operator = torch.ops.memopt.linear_cross_entropy_weight_gradient.default
    call = describe(operator, arguments, {}, weight_gradient(*arguments))
    dry_run = op_dry_run(call, "cuda", LARGE)
    assert dry_run is not None
    results = [one for one in dry_run.calls if one.block < len(call.outputs)]
    assert [(one.allocates, one.bytes) for one in results] == [(True, 4 * WIDTH * CLASSES)]


def test_other_operators_are_not_rehearsed() -> None:
    matrix = torch.empty(8, 8, device="meta")
    call = describe(torch.ops.aten.mm.default, (matrix, matrix), {}, matrix)
    assert op_dry_run(call, "cuda", LARGE) is None
