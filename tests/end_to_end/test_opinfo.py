"""Operators of torch's OpInfo database with everything recomputed that may be: bitwise the plain module's step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db

from examples.models.operator_trials import ALL, IN_PLACE, LOSS, SMALLEST, samples, staged
from tests.marks import slow

OPERATORS = {f"{op.name}.{op.variant_test_name}".strip("."): op for op in reversed([*op_db, *custom_op_db])}

COMMON = (
    "add", "addmm", "amax", "bmm", "cat", "cumsum", "diagonal_scatter", "einsum", "expand", "fft.rfft", "gather",
    "index_add", "linalg.svd", "logsumexp", "masked_fill", "nn.functional.batch_norm", "nn.functional.conv2d",
    "nn.functional.dropout", "nn.functional.embedding", "nn.functional.gelu", "nn.functional.interpolate.bicubic",
    "nn.functional.layer_norm", "nn.functional.max_pool2d", "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention", "pow", "prod", "scatter_reduce.amax", "sort", "split", "std",
    "topk", "where",
)  # fmt: skip
QUICK = (
    "add", "einsum", "index_add", "nn.functional.batch_norm", "nn.functional.dropout", "nn.functional.layer_norm",
    "nn.functional.max_pool2d", "nn.functional.scaled_dot_product_attention", "scatter_reduce.amax", "where",
)  # fmt: skip
"""Of the common ones, those that `make test` tries: random numbers, statistics, indices and views are among them."""
MENDED = (
    ("addcdiv", LOSS),
    ("addcmul", IN_PLACE),
    ("to", LOSS),
    ("narrow", SMALLEST),
    ("NumpySplitCopyWithIntCustomOp", ALL),
)
"""Operators that once differed or were refused."""


@pytest.fixture(autouse=True)
def always_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    monkeypatch.setenv("MEMOPT_CACHE", "0")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "stage", "most_samples"),
    [
        *((name, ALL, 1) if name in QUICK else slow(name, ALL, 1) for name in COMMON),
        *((*case, 2) for case in MENDED),
    ],
)
def test_an_operator_is_right(name: str, stage: str, most_samples: int) -> None:
    op: Any = OPERATORS[name]
    for sample in samples(op, torch.float32, most_samples):
        found = staged(op, sample, stage)
        assert found["verdict"] == "right", found


@pytest.mark.filterwarnings("ignore")
def test_what_torch_cannot_trace_is_refused() -> None:
    op = OPERATORS["polygamma.polygamma_n_0"]
    found = staged(op, samples(op, torch.float32)[0], IN_PLACE)
    assert found["verdict"] == "refused"
    assert "polygamma_" in found["message"]


HIGHER_ORDER = {op.name: op for op in reversed(hop_db)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cond", *map(slow, ("invoke_subgraph", "map"))])
def test_control_flow_in_the_graph_is_right(name: str) -> None:
    op: Any = HIGHER_ORDER[name]
    found = staged(op, samples(op, torch.float32, 1)[0], SMALLEST)
    assert found["verdict"] == "right", found


@pytest.mark.filterwarnings("ignore")
def test_a_call_that_torch_traces_without_its_result_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd's own partitioner fails on it, and writes a file to the working directory."""
    monkeypatch.chdir(tmp_path)
    op: Any = HIGHER_ORDER["invoke_quant"]
    found = staged(op, samples(op, torch.float32, 1)[0], LOSS)
    assert found["verdict"] == "refused"
    assert "invoke_quant in the graph that torch traced cannot be planned" in found["message"]
