"""Inductor writes the same code for a model whether or not it has met the model's operators before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import memopt
import memopt.emit.inductor as backend
from memopt.compat.inductor_lowering import make_fallbacks_known
from passes.ops.offload_ops import AWAIT_OUT, COPY_OUT, host_memory


def unknown_operator(name: str) -> Any:
    """A new operator, for which inductor has no lowering."""
    full_name, schema = f"memopt_tests::{name}", "(Tensor x) -> Tensor"
    doubled = torch.library.custom_op(full_name, lambda x: 2 * x, mutates_args=(), schema=schema)
    doubled.register_fake(torch.empty_like)
    return getattr(torch.ops.memopt_tests, name).default


class Shared(nn.Module):
    """A value that a reduction uses and, after a product of matrices, an operator without a lowering."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.weight, self.operator = nn.Parameter(torch.ones(64, 32)), operator

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shared = torch.sin(x) * y
        loss: torch.Tensor = ((x + shared.var(0)) @ self.weight).sum() + self.operator(shared).sum()
        return loss


def sources_of(operator: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code that inductor writes for the forward and the backward of a model, without its comments."""
    found: list[str] = []
    model, half = Shared(operator), backend.Half

    def noting(source: str, inputs: Any) -> Any:
        found.append("\n".join(line for line in source.splitlines() if not line.lstrip().startswith("#")))
        return half(source, inputs)

    with monkeypatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True):
        patch.setattr(backend, "Half", noting)
        batch = torch.randn(32, 64), torch.randn(32, 64)
        memopt.optimize(model, 1.0, example_inputs=batch, backend="inductor", precision="fp32")
        model(*batch).backward()
    memopt.remove(model)
    torch._dynamo.reset()
    return found


@pytest.mark.slow
def test_a_second_compilation_writes_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = unknown_operator("compiled_twice")
    first, second = (sources_of(operator, monkeypatch) for _ in range(2))
    assert first
    assert first == second


def test_an_operator_is_known_as_inductor_would_make_it_known_at_its_call() -> None:
    from torch._inductor import lowering

    ours, theirs = unknown_operator("made_known"), unknown_operator("met_at_its_call")
    graph = fx.Graph()
    graph.output(graph.call_function(ours, (graph.placeholder("x"),)))
    make_fallbacks_known(fx.GraphModule(nn.Module(), graph), is_backward=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda x: theirs(x), fullgraph=True)(torch.ones(2))
    for op in (ours, theirs):
        assert op in lowering.lowerings
        assert op in lowering.needs_realized_inputs
    assert lowering.maybe_layout_constraints(ours) == lowering.maybe_layout_constraints(theirs)


def test_operators_that_inductor_lowers_keep_their_lowering() -> None:
    from torch._inductor import lowering

    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),)))
    before = dict(lowering.lowerings)
    make_fallbacks_known(fx.GraphModule(nn.Module(), graph), is_backward=True)
    assert lowering.lowerings == before


def pooled_and_offloaded(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Two convolutions with a pooling between them, whose positions go to the host."""
    pool: Any = torch.ops.prims._low_memory_max_pool_with_offsets.default
    values, positions = pool(torch.relu(torch.conv2d(x, weight)), [3, 3], [2, 2], [1, 1], [1, 1], False)
    return [torch.conv2d(values, weight), AWAIT_OUT(COPY_OUT(positions), positions)]


@pytest.mark.slow
def test_what_is_copied_to_the_host_is_laid_out_there_as_inductor_lays_out_results() -> None:
    """Where inductor makes convolutions channels-last, it wants results with their strides. If it copied
    an offloaded value to a second host tensor for that, the backward could not find the value's memory."""
    import torch._inductor.inductor_prims
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    inputs = [torch.randn(2, 8, 16, 16), torch.randn(8, 8, 3, 3)]
    module = make_fx(pooled_and_offloaded, tracing_mode="fake")(*inputs)
    make_fallbacks_known(module, is_backward=False)
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode = fakes[0].fake_mode
    settings = torch._inductor.config.patch(force_layout_optimization=True, force_disable_caches=True)
    with settings, mode, tracing(TracingContext(mode)):
        compiled: Any = compile_fx_inner(module, fakes)
    _, positions = compiled(list(inputs))
    assert positions.is_contiguous(memory_format=torch.channels_last)
    assert host_memory("cpu").block(positions)


class Pooled(nn.Module):
    """An average pooling whose last windows reach beyond the padding."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.conv = (nn.Conv2d, nn.Conv3d)[dimensions - 2](2, 2, 1)
        self.pool = (nn.AvgPool2d, nn.AvgPool3d)[dimensions - 2](2, ceil_mode=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.pool(self.conv(x))
        return pooled.square().sum()


@pytest.mark.slow  # compiles a step
@pytest.mark.parametrize("dimensions", [2, 3])
def test_gradients_of_pools_with_windows_cut_at_the_end(dimensions: int) -> None:
    """The gradients of torch.compile are wrong here: its code divides by the size of the whole window."""
    model, plain, x = Pooled(dimensions), Pooled(dimensions), torch.randn(2, 2, *[5] * dimensions)
    plain.load_state_dict(model.state_dict())
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", backend="inductor")
    for one in (model, plain):
        one(x).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
