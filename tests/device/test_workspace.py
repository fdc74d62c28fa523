"""Workspace as measured, and the rules for what is not run against the measurement."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from memopt.compat.fakes import FakeTensorMode
from memopt.compat.host import profiler_is_active
from memopt.device.op_call import OpCall, describe, op_call
from memopt.device.workspace import (
    MAX_RUN_BYTES,
    _Measured,
    call_workspace_bytes,
    estimate_workspace,
    measure_workspaces,
)
from memopt.meter import measure_peak

aten = torch.ops.aten
MB = 1024**2


def nodes_of(function: Callable[..., Any], *inputs: Tensor) -> list[fx.Node]:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def node_of(function: Callable[..., Any], *inputs: Tensor, op: Any) -> fx.Node:
    return next(node for node in nodes_of(function, *inputs) if node.target is op)


def with_gradients(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """The joint graph of a function: its ops and those of its backward."""

    def joint(*inputs: Tensor) -> Any:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        result = function(*leaves)
        return torch.autograd.grad(result, [x for x in leaves if x.requires_grad], torch.ones_like(result))

    return joint


x = torch.randn(8, 32, 64)
image = torch.randn(2, 8, 16, 16)


def norm(a: Tensor) -> Tensor:
    return F.group_norm(a, 4, torch.ones(8), torch.ones(8))


def attention(a: Tensor) -> Tensor:
    heads = a.view(8, 32, 4, 16).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear-gelu": (lambda a, w: F.gelu(a @ w), (x, torch.randn(64, 96))),
    "bf16": (lambda a, w: F.gelu(a @ w), (x.bfloat16(), torch.randn(64, 96).bfloat16())),
    "mixed": (lambda a, b: a * b, (x, x.bfloat16())),
    "dropout": (lambda a: F.dropout(a, 0.1), (x,)),
    "softmax": (lambda a: a.softmax(-1).log_softmax(1), (x,)),
    "layer-norm": (lambda a: F.layer_norm(a.transpose(1, 2), (32,), torch.ones(32), torch.ones(32)), (x,)),
    "attention": (attention, (x,)),
    "attention-bf16": (attention, (x.bfloat16(),)),
    "embedding": (lambda w: F.embedding(torch.zeros(32, 8, dtype=torch.int64).t(), w), (torch.randn(100, 64),)),
    "cross-entropy": (lambda a: F.cross_entropy(a.flatten(0, 1), torch.zeros(256, dtype=torch.int64)), (x,)),
    "mse": (lambda a, b: F.mse_loss(a, b), (x, x)),
    "conv": (lambda a, w: F.conv2d(a, w, padding=1), (image, torch.randn(16, 8, 3, 3))),
    "conv-double": (lambda a, w: F.conv2d(a, w, padding=1), (image.double(), torch.randn(16, 8, 3, 3).double())),
    "conv-transposed": (lambda a, w: F.conv_transpose2d(a, w, stride=2), (image, torch.randn(8, 4, 2, 2))),
    "batch-norm": (lambda a: F.batch_norm(a, None, None, torch.ones(8), torch.ones(8), True), (image,)),
    "group-norm": (norm, (image,)),
    "up": (lambda a: F.interpolate(a, scale_factor=2.0), (image,)),
    "pool": (lambda a: F.max_pool2d(a, 2), (image,)),
    "reductions": (lambda a: a.sum(0) + a.mean(0) + a.var(0) + a.amax(0), (x,)),
    "reductions-bf16": (lambda a: a.sum(0) + a.mean(0), (x.bfloat16(),)),
    "mask": (lambda a: a[a > 0].sum(), (x,)),
    "scatter-bf16": (lambda a: a.scatter_add(1, torch.zeros(8, 32, 64, dtype=torch.int64), a), (x.bfloat16(),)),
    "sort": (lambda a: a.sort(1)[0], (x,)),
    "cumsum": (lambda a: (a > 0).cumsum(1) * a, (x,)),
    "cat": (lambda a, b: torch.cat([a, b.transpose(1, 2).reshape(8, 32, 64)]), (x, x)),
}


def calls_of(name: str) -> list[tuple[fx.Node, OpCall]]:
    function, inputs = CASES[name]
    found = [(node, op_call(node)) for node in nodes_of(with_gradients(function), *inputs)]
    return [(node, call) for node, call in found if call is not None]


@pytest.mark.parametrize("name", CASES)
def test_rules_for_the_cpu_are_never_under_what_is_measured(name: str) -> None:
    calls = calls_of(name)
    measured = measure_workspaces([node for node, _ in calls])
    for node, call in calls:
        assert measured[node].output_bytes is not None, f"{call.op} was not run"
        assert estimate_workspace(call, "cpu") >= measured[node].workspace_bytes, str(call)


@pytest.mark.parametrize("name", CASES)
def test_rules_for_cuda_hold_for_every_op(name: str) -> None:
    for _, call in calls_of(name):
        every = sum(spec.dense_bytes for spec in (*call.inputs, *call.outputs))
        assert 0 <= estimate_workspace(call, "cuda") <= 4 * every + 64 * MB


def test_what_is_measured_is_what_the_meter_sees() -> None:
    node = node_of(lambda a: torch.native_dropout(a, 0.5, True), x, op=aten.native_dropout.default)
    with measure_peak("cpu") as peak:
        results = torch.native_dropout(x, 0.5, True)
    measured = measure_workspaces([node])[node]
    assert measured.output_bytes == sum(result.nbytes for result in results)
    assert measured.workspace_bytes + measured.output_bytes == peak.allocated_bytes
    assert measured.workspace_bytes >= x.nbytes
    assert measured.seconds is not None
    assert 0 < measured.seconds < 1


def test_views_make_nothing_and_python_operators_have_no_kernel() -> None:
    nodes = nodes_of(lambda a: a.view(-1).split(64)[0].expand(2, 64), x)
    measured = measure_workspaces(nodes)
    assert all(m.workspace_bytes == 0 and not m.output_bytes for m in measured.values())
    getitems = [node for node in nodes if node.target is operator.getitem]
    assert measured[getitems[0]] == _Measured(0, None, None)


def test_a_loss_may_keep_more_than_its_fake_tensor_says() -> None:
    node = node_of(lambda a, b: F.mse_loss(a, b), x, x, op=aten.mse_loss.default)
    assert node.meta["val"].untyped_storage().nbytes() == 4
    assert measure_workspaces([node])[node].output_bytes == x.nbytes


def test_the_random_state_stays() -> None:
    node = node_of(lambda a: torch.native_dropout(a, 0.25, True), x, op=aten.native_dropout.default)
    before = torch.get_rng_state()
    measure_workspaces([node])
    assert torch.equal(before, torch.get_rng_state())


def test_measuring_is_done_once_and_needs_nothing_of_the_caller() -> None:
    inputs = (torch.randn(17, 33), torch.randn(33, 5))
    node = node_of(torch.mm, *inputs, op=aten.mm.default)
    with torch.autocast("cpu"), FakeTensorMode(), measure_peak("cpu") as peak:
        first = measure_workspaces([node])[node]
        assert profiler_is_active()
    assert peak.allocated_bytes == 0
    assert first.output_bytes == 17 * 5 * 4  # not autocast's bf16
    assert measure_workspaces([node])[node] is first
    twin = node_of(torch.mm, *inputs, op=aten.mm.default)
    assert measure_workspaces([twin])[twin] is first


def test_what_is_large_or_cannot_run_is_estimated() -> None:
    with torch.device("meta"):
        large, square = torch.empty(MAX_RUN_BYTES // 4 + 1), torch.empty(8192, 8192)
    copied = node_of(lambda a: a + 1, large, op=aten.add.Tensor)
    product = node_of(torch.mm, square, square, op=aten.mm.default)
    singular = node_of(torch.linalg.lu_solve, *lu(), op=aten.linalg_lu_solve.default)
    for node, measured in measure_workspaces([copied, product, singular]).items():
        call = op_call(node)
        assert call is not None
        assert measured == _Measured(estimate_workspace(call, "cpu"), None, None)


def lu() -> tuple[Tensor, Tensor, Tensor]:
    return torch.eye(4), torch.arange(1, 5, dtype=torch.int32), torch.ones(4, 2)


def test_an_operator_of_another_library_is_not_run_on_made_up_indices() -> None:
    """Its kernel may trust them: those of torchmd-net wrote past the end of their results, and the process ended."""
    runs = []

    @torch.library.custom_op("test_workspace::trusting", mutates_args=())
    def trusting(values: Tensor, starts: Tensor) -> Tensor:
        runs.append(starts)
        return values + 1

    values = torch.rand(8)
    for indices, ran in ((torch.arange(9), 0), (torch.rand(9), 1)):
        call = describe(torch.ops.test_workspace.trusting.default, (values, indices), {}, values)
        call_workspace_bytes(call, "cpu")
        assert bool(runs) is bool(ran)


def test_products_by_expert_hold_no_workspace_in_fp32() -> None:
    """A rule says so: operators of another library that take indices are not run on made-up ones to measure them."""
    from transformers.integrations import moe  # noqa: F401  registers them

    tokens, weights, ends = torch.rand(12, 4), torch.rand(2, 4, 8), torch.tensor([5, 12], dtype=torch.int32)
    forward, backward = (getattr(torch.ops.transformers, f"grouped_mm_fallback{part}") for part in ("", "_backward"))
    result = forward(tokens, weights, ends)
    calls = [
        describe(forward.default, (tokens, weights, ends), {}, result),
        describe(backward.default, (tokens, weights, ends, result), {}, (tokens, weights)),
    ]
    assert [call_workspace_bytes(call, "cpu") for call in calls] == [0, 0]


def test_flash_attentions_backward_on_cuda_holds_fp32_gradients() -> None:
    query = torch.randn(2, 4, 128, 64, dtype=torch.bfloat16)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    joint = with_gradients(lambda q: F.scaled_dot_product_attention(q, q, q))
    assert call_workspace_bytes(op_call(node_of(joint, query, op=backward)), "cuda") >= query.numel() * 4


def test_a_matmul_on_cuda_holds_nothing_of_its_own() -> None:
    node = node_of(torch.mm, torch.randn(8, 8), torch.randn(8, 8), op=aten.mm.default)
    assert call_workspace_bytes(op_call(node), "cuda") == 0
    assert call_workspace_bytes(op_call(node), "cpu") == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_is_measured_with_the_threads_that_it_will_run_with(threads: int) -> None:
    """oneDNN takes its threads' buffers by a setting that belongs to the thread which calls it."""
    column, row = torch.randn(256, 1).bfloat16(), torch.randn(1, 512).bfloat16()
    (node,) = [node for node in nodes_of(torch.mm, column, row) if node.target is aten.mm.default]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        column @ row  # what is made once
        with measure_peak("cpu") as peak:
            product = column @ row
        assert call_workspace_bytes(op_call(node), "cpu") == peak.allocated_bytes - product.nbytes
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("op", [aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("shape", "dim"), [((64, 1000), 1), ((64, 1000), 0), ((4, 8, 33, 65), -1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_rules_for_softmax_are_near(op: Any, dtype: torch.dtype, shape: Any, dim: int, *, transposed: bool) -> None:
    scores = torch.randn(shape).to(dtype)
    scores = scores.transpose(0, 1) if transposed else scores
    arguments = (scores, dim) if op is aten._safe_softmax.default else (scores, dim, False)
    call = describe(op, arguments, {}, op(*arguments))
    measured = call_workspace_bytes(call, "cpu")
    masks = scores.numel() if op is aten._safe_softmax.default and transposed else 0
    assert measured <= estimate_workspace(call, "cpu") <= 1.06 * measured + masks + 2**15


def test_a_matmul_into_another_dtype_is_priced() -> None:
    """Torch's formula for its operations does not take the dtype, which is a positional argument."""
    a, b, result = (torch.empty(8, 8, dtype=torch.bfloat16, device="meta") for _ in range(3))
    call = describe(aten.addmm.dtype, (result, a, b, torch.float32), {}, result.float())
    assert call_workspace_bytes(call, "cpu") >= 0


@pytest.mark.parametrize("accumulate", [None, False, True])
@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int64), (torch.int32, torch.int64), (torch.int32, torch.int32)])
def test_indices_are_converted_after_they_are_broadcast(dtypes: Any, *, accumulate: bool | None) -> None:
    rows, columns = torch.arange(200).to(dtypes[0])[:, None], torch.arange(200).to(dtypes[1])[None]
    table = torch.randn(200, 200)
    values = table[rows, columns].clone()
    op, arguments = aten.index.Tensor, (table, [rows, columns])
    if accumulate is not None:
        op, arguments = aten.index_put.default, (table, [rows, columns], values, accumulate)
    call = describe(op, arguments, {}, op(*arguments))
    measured = call_workspace_bytes(call, "cpu")
    converted = 8 * values.numel() * dtypes.count(torch.int32)
    assert converted <= measured <= estimate_workspace(call, "cpu") <= converted + 2**15
