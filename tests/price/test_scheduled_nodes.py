"""Which nodes schedules name: what makes memory or writes, neither views nor elements of tuples."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from memopt.device.storages import is_mutation
from memopt.price.price import is_scheduled


def nodes() -> dict[str, fx.Node]:
    def function(x: torch.Tensor) -> torch.Tensor:
        values, _ = torch.sort(x.view(-1))
        values.add_(1)
        return values

    graph = make_fx(function, tracing_mode="fake")(torch.zeros(2, 3)).graph
    return {node.name: node for node in graph.nodes}


def test_operators_that_make_memory_or_write_are_scheduled() -> None:
    found = nodes()
    scheduled = {name for name, node in found.items() if is_scheduled(node)}
    assert scheduled == {"sort", "add_"}
    assert {name for name, node in found.items() if node.op == "call_function" and is_mutation(node)} == {"add_"}
