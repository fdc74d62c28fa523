from __future__ import annotations

import torch

from memopt.device.cuda import CUDA
from memopt.device.op_call import describe
from memopt.solver.problem import BlockCall

aten = torch.ops.aten
VALUES = torch.empty(1024, 512, device="meta")


def test_the_mask_of_a_dropout_is_allocated_before_its_values() -> None:
    results = aten.native_dropout.default(VALUES, 0.1, True)
    call = describe(aten.native_dropout.default, (VALUES, 0.1, True), {}, results)
    mask, values = BlockCall(True, 1, 1024 * 512), BlockCall(True, 0, 4 * 1024 * 512)
    assert CUDA.result_calls(call, 0) == (mask, values)
    assert CUDA.result_calls(call, 100) == (mask, values, BlockCall(True, 2, 100), BlockCall(False, 2, 100))


def test_other_kernels_allocate_their_results_as_they_return_them() -> None:
    results = aten.max.dim(VALUES, 0)
    assert CUDA.result_calls(describe(aten.max.dim, (VALUES, 0), {}, results), 100) == ()
