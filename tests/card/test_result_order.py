"""The order in which torch's kernels allocate their results, as plans have it and as torch's allocator is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memopt.device.cuda import CUDA
from memopt.device.op_call import describe

aten = torch.ops.aten
MB = 1024**2


def values(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


def attention(op: Any) -> tuple[Any, tuple[Any, ...]]:
    query = values(8, 16, 1024, 64)
    bias = (None,) if op is aten._scaled_dot_product_efficient_attention.default else ()
    return op, (query, query, query, *bias, *((0.0, True, False) if not bias else (True, 0.0, True)))


def images(op: Any) -> tuple[Any, tuple[Any, ...]]:
    sums = values(64, dtype=torch.float32)
    return op, (values(8, 64, 128, 128), sums, sums, sums, sums, True, 0.1, 1e-5)


def cell() -> tuple[Any, tuple[Any, ...]]:
    gates = values(2048, 4096)
    return aten._thnn_fused_lstm_cell.default, (gates, gates, values(2048, 1024), values(4096), values(4096))


CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "dropout": lambda: (aten.native_dropout.default, (values(8192, 1024), 0.1, True)),
    "dropout of an older name": lambda: (aten._fused_dropout.default, (values(8192, 1024), 0.9)),
    "cell of an LSTM": cell,
    "layer norm": lambda: (
        aten.native_layer_norm.default,
        (values(2**22, 8), [8], values(8), values(8), 1e-5),
    ),
    "batch norm": lambda: images(aten.native_batch_norm.default),
    "flash attention": lambda: attention(aten._scaled_dot_product_flash_attention.default),
    "efficient attention": lambda: attention(aten._scaled_dot_product_efficient_attention.default),
    "maximum": lambda: (aten.max.dim, (values(64, 2048, 1024), 0)),
    "maximum of pixels": lambda: (aten.max_pool2d_with_indices.default, (values(8, 64, 128, 128), [2, 2])),
    "sort": lambda: (aten.sort.default, (values(4096, 4096),)),
    "largest": lambda: (aten.topk.default, (values(4096, 4096), 2048)),
    "running maximum": lambda: (aten.cummax.default, (values(4096, 4096), 1)),
    "variance and mean": lambda: (aten.var_mean.correction, (values(64, 2048, 1024), [0])),
    "parts": lambda: (aten.split_with_sizes_copy.default, (values(8192, 6144), [1024, 2048, 3072], -1)),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_allocated_in_the_order_of_the_plan(name: str) -> None:
    op, args = CASES[name]()
    op(*args)
    torch.cuda.memory._record_memory_history(context=None)
    results = [result for result in op(*args) if isinstance(result, Tensor)]
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    places = {result.untyped_storage().data_ptr(): place for place, result in enumerate(results)}
    allocated = [places[event["addr"]] for event in trace if event["action"] == "alloc" and event["addr"] in places]
    planned = [one.block for one in CUDA.result_calls(describe(op, args, {}, results), 0)] or list(range(len(results)))
    large = {place for place, result in enumerate(results) if result.nbytes > MB}
    assert large
    assert [place for place in allocated if place in large] == [place for place in planned if place in large]
