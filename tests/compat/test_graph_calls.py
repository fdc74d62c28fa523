from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from memopt.compat.dynamo import compile_with
from memopt.compat.operators import ENTERS_AUTOCAST, LEAVES_AUTOCAST, SETS_GRAD_MODE


def targets(call: Any) -> list[Any]:
    """The targets of the calls in the graph that Dynamo makes of a function."""
    found: list[Any] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        found.extend(node.target for node in graph_module.graph.nodes if node.op == "call_function")
        return graph_module.forward

    compile_with(backend, call, whole=True)(torch.ones(2, 2, requires_grad=True))
    return found


def test_autocast() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    first, *_, last = targets(call)
    assert first is ENTERS_AUTOCAST
    assert last is LEAVES_AUTOCAST


def test_grad_mode() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = x.sin()
        return x * fixed

    assert [target is SETS_GRAD_MODE for target in targets(call)] == [True, True, False]  # x.sin() is a call_method


def test_checkpoint() -> None:
    def call(x: torch.Tensor) -> Any:
        return checkpoint(torch.sin, x, use_reentrant=False)

    assert torch.ops.higher_order.tag_activation_checkpoint in targets(call)
