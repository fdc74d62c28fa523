from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memopt.compat.dynamo import compile_with
from memopt.compat.fakes import FakeTensor, fresh_fakes
from memopt.compat.tracing import before_tracing, opaque_call, pre_dispatch_graph

aten = torch.ops.aten


def in_backend(call: Callable[..., Any], look: Callable[[fx.GraphModule, list[Any]], None], *inputs: Any) -> None:
    """Calls `look` with the region of `call` in a Dynamo backend."""

    def backend(graph_module: fx.GraphModule, given: list[Any]) -> Any:
        look(graph_module, given)
        return graph_module.forward

    compile_with(backend, call, whole=True)(*inputs)


def names(graph_module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


def test_operators_are_recorded_whole_and_inputs_are_not_written_to() -> None:
    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.add_(1), weight)

    def look(graph_module: fx.GraphModule, given: list[Any]) -> None:
        mode, fakes = fresh_fakes(given)
        assert all(isinstance(fake, FakeTensor) and fake.fake_mode is mode for fake in fakes)
        assert [fake.shape for fake in fakes] == [value.shape for value in given]
        versions = [value._version for value in given]
        traced = pre_dispatch_graph(graph_module, mode, fakes)
        assert names(traced) == ["aten.add_.Tensor", "aten.linear.default"]
        assert [value._version for value in given] == versions

    in_backend(call, look, torch.ones(2, 2), torch.ones(3, 2))


def test_calls_are_seen_before_the_tracer() -> None:
    def look(graph_module: fx.GraphModule, given: list[Any]) -> None:
        def see(trace: Any, within: Any, operator: Any, args: Any, kwargs: Any) -> Any:
            return trace(aten.cos.default if operator is aten.sin.default else operator, args, kwargs)

        def call(*inputs: Any) -> Any:
            with before_tracing(see):
                first = graph_module(*inputs)
            return first, graph_module(*inputs)

        mode, fakes = fresh_fakes(given)
        assert names(pre_dispatch_graph(call, mode, fakes)) == ["aten.cos.default", "aten.sin.default"]

    in_backend(torch.sin, look, torch.ones(2))


def test_a_higher_order_operator_is_one_node() -> None:
    body = fx.symbolic_trace(lambda x: (x.sin().cos(),))

    def look(graph_module: fx.GraphModule, given: list[Any]) -> None:
        def call(x: Any) -> Any:
            return opaque_call(torch.ops.higher_order.tag_activation_checkpoint, (body, x), {}, mode)[0] + 1

        mode, fakes = fresh_fakes(given)
        traced = pre_dispatch_graph(call, mode, fakes)
        assert names(traced) == ["tag_activation_checkpoint", "<built-in function getitem>", "aten.add.Tensor"]

    in_backend(torch.sin, look, torch.ones(2))
