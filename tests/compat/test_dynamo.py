from __future__ import annotations

import contextvars
import gc
import logging
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import fx, nn
from torch._dynamo import exc
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends

from memopt.compat import dynamo
from memopt.compat.dynamo import (
    capture_settings,
    compile_with,
    compiled_several_times,
    copy_source,
    drop_compilations,
    keep_nodes,
    tracing_again,
)
from memopt.compat.dynamo_rules import keeping_requires_grad


def test_the_errors_are_those_of_dynamo() -> None:
    assert dynamo.BackendCompilerFailed is exc.BackendCompilerFailed
    assert dynamo.RecompileLimit is exc.FailOnRecompileLimitHit
    assert dynamo.DynamoError is exc.TorchDynamoException
    with pytest.raises(AttributeError, match="has no attribute 'AnotherError'"):
        dynamo.AnotherError  # noqa: B018


def test_settings_hold_in_the_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning, raising=False)
    before = dynamo_config.get_config_copy(), functorch_config.get_config_copy()
    with capture_settings():
        assert dynamo_config.capture_scalar_outputs
        assert dynamo_config.fail_on_recompile_limit_hit
        assert dynamo_config.recompile_limit == dynamo.RECOMPILE_LIMIT
        assert logging.Logger.warning_once in dynamo_config.ignore_logging_functions  # type: ignore[attr-defined]
        assert not functorch_config.functionalize_rng_ops
    assert (dynamo_config.get_config_copy(), functorch_config.get_config_copy()) == before


def test_dynamo_can_record_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning, raising=False)
    before = dynamo_utils._get_dynamo_config_for_logging
    with capture_settings():
        dynamo_utils._get_dynamo_config_for_logging()
    assert dynamo_utils._get_dynamo_config_for_logging is before


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("addcdiv", lambda x, y: torch.addcdiv(x, y, y + 1, value=3.14)),
        ("addcdiv_", lambda x, y: x.clone().addcdiv_(y, y + 1, value=3.14)),
        ("addcmul_", lambda x, y: x.clone().addcmul_(y, y, value=3.14)),
        ("add_", lambda x, y: x.clone().add_(y, alpha=0.1)),
    ],
)
def test_operators_with_a_number_as_value_are_traced_as_they_are(name: str, call: Any) -> None:
    targets: set[str] = set()

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        targets.update(str(getattr(node.target, "__name__", node.target)) for node in graph_module.graph.nodes)
        return graph_module.forward

    x, y = torch.rand(2, 9, 9)
    with capture_settings():
        assert torch.equal(compile_with(backend, call, whole=True)(x, y), call(x, y))
    assert name in targets
    assert not targets & {"div", "mul", "fma", "copy_"}


def test_a_compiled_call_leaves_no_backend_behind() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    def call(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    known = set(cached_backends)
    compiled = compile_with(backend, call, whole=True)
    assert torch.equal(compiled(torch.ones(3)), call(torch.ones(3)))
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    assert len(graphs) == 2
    assert set(cached_backends) == known


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh()


def test_code_that_is_compiled_several_times_is_found() -> None:
    """Dynamo's second call runs another compilation of the first layer than its first one did."""
    began: list[str] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        names = " ".join(node.name for node in graph_module.graph.nodes if node.op.startswith("call"))

        def run(*args: Any) -> Any:
            began.append(names)
            return graph_module.forward(*args)

        return run

    layers = nn.Sequential(_Layer(), _Layer())
    layers[1].lin.register_full_backward_hook(lambda module, grads, outputs: None)  # type: ignore[operator, union-attr]
    inputs = torch.ones(2, 4, requires_grad=True)
    with capture_settings():
        compiled = compile_with(backend, lambda x: layers(x), whole=False)
        compiled(inputs)
        first = began.copy()
        assert compiled_several_times(lambda compiler: compiler is backend)
        assert not compiled_several_times(lambda compiler: False)
        began.clear()
        compiled(inputs)
    assert first == ["linear tanh", "tanh"]
    assert began == ["tanh", "tanh"]


def test_compilations_of_dead_backends_are_dropped() -> None:
    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return graph_module.forward

    def call(x: torch.Tensor) -> torch.Tensor:
        return x.cos() + 1

    compile_with(backend, call, whole=True)(torch.ones(3))
    assert _debug_get_cache_entry_list(call.__code__)
    drop_compilations(lambda compiler: False)
    assert _debug_get_cache_entry_list(call.__code__)
    drop_compilations(lambda compiler: compiler is backend)
    assert not _debug_get_cache_entry_list(call.__code__)
    gc.collect()


def test_a_region_can_be_lowered_again() -> None:
    contexts: list[Any] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        contexts.extend([torch._guards.TracingContext.get(), tracing_again()])
        return graph_module.forward

    compile_with(backend, lambda x: x.tan() + 1, whole=True)(torch.ones(3))
    context, again = contexts
    assert torch._guards.TracingContext.try_get() is None
    for _ in range(2):
        with again():
            assert torch._guards.TracingContext.get() is context


def test_the_source_of_a_placeholder_is_copied() -> None:
    graph = fx.Graph()
    one, other, third = (graph.placeholder(name) for name in "abc")
    one._dynamo_source = "L['x']"  # type: ignore[attr-defined]
    copy_source(one, other)
    assert other._dynamo_source == "L['x']"  # type: ignore[attr-defined]
    copy_source(third, other)
    assert other._dynamo_source is None  # type: ignore[attr-defined]


def test_texts_that_classes_and_functions_of_torch_have_are_known() -> None:
    """PEFT's DoRA asks `type(weight).__module__.startswith("torchao.")`, which breaks the graph where that class is one
    of those that Dynamo writes into graphs."""

    def call(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.relu.__name__.startswith("re") else x.cos()

    x = torch.randn(3)
    with capture_settings():
        compiled = torch.compile(call, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), x.sin())


@pytest.mark.parametrize("assigned", [False, True])
def test_a_value_that_requires_grad_from_the_middle_on_does_not_break_the_graph(assigned: bool) -> None:
    graphs: list[fx.GraphModule] = []
    weight = torch.ones(3, requires_grad=True)

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph_module)
        return graph_module.forward

    def call(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        hidden = x.sin()
        if assigned:
            hidden.requires_grad = True
        else:
            hidden.requires_grad_(True)
        return hidden * weight, hidden.requires_grad

    compiled = compile_with(backend, call, whole=True)
    with capture_settings(), keeping_requires_grad():
        _, requires_grad = compiled(torch.ones(3))
    assert requires_grad
    assert [node.target for node in graphs[0].graph.find_nodes(op="call_method", target="requires_grad_")]
    with capture_settings(), pytest.raises(exc.TorchDynamoException):
        compile_with(backend, lambda x: call(x + 1), whole=True)(torch.ones(3))


def test_a_kept_graph_outlives_a_compilation_that_an_error_ends() -> None:
    graphs: list[fx.GraphModule] = []

    class Stop(Exception):
        pass

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        keep_nodes(graph_module)
        graphs.append(graph_module)
        raise Stop

    with pytest.raises(exc.BackendCompilerFailed):
        compile_with(backend, lambda x: x.sinh() + 1, whole=True)(torch.ones(3))
    assert [node.name for node in graphs[0].graph.nodes if node.op.startswith("call")] == ["sinh", "add"]
    assert all("example_value" in node.meta for node in graphs[0].graph.nodes if node.op != "output")


def test_only_export_is_exporting() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if dynamo.is_exporting() else x - 1

    x = torch.ones(3)
    exported = torch.export.export(Model(), (x,)).module()
    assert torch.equal(exported(x), x + 1)
    assert torch.equal(torch.compile(Model(), backend="eager")(x), x - 1)


def test_settings_leave_nothing_behind() -> None:
    """A patch of torch's settings makes a context variable, which is never freed: a leak at every step."""
    with capture_settings():
        pass
    before = len(contextvars.copy_context())
    for _ in range(3):
        with capture_settings():
            pass
    assert len(contextvars.copy_context()) == before
