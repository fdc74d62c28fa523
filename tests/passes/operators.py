"""Operator graphs to test passes on, captured from real functions and models, and their gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from memopt.capture.operators import operator_graph
from memopt.compat.dynamo import capture_settings


@dataclass(frozen=True)
class Operators:
    """An operator graph and the inputs that it was captured with."""

    graph_module: GraphModule
    inputs: tuple[Any, ...]


def capture_operators(call: Callable[..., Any], *args: Any, dynamic: bool = False, **kwargs: Any) -> Operators:
    """Traces one call, which must be a single region; `dynamic` gives symbolic sizes to all that is no parameter."""
    found: list[Operators] = []

    def backend(graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        operators = operator_graph(graph_module, inputs, frozenset()).module

        def run(*inputs: Any) -> Any:
            found.append(Operators(operators, inputs))
            return graph_module(*inputs)

        return run

    torch._dynamo.reset()
    with capture_settings():
        torch.compile(lambda *a, **k: call(*a, **k), backend=backend, dynamic=dynamic, fullgraph=True)(*args, **kwargs)
    return found[0]


def outputs_and_gradients(graph_module: GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], list[Tensor | None]]:
    """The results of a graph, and the gradients of the first scalar among them by its inputs; seeded."""
    torch.manual_seed(0)
    outputs = list(graph_module(*inputs))
    loss = next(output for output in outputs if isinstance(output, Tensor) and output.dim() == 0)
    leaves = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.requires_grad]
    return outputs, list(torch.autograd.grad(loss, leaves, allow_unused=True))


def norm_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    wide, reference = found.detach().double(), expected.detach().double()
    return float((wide - reference).norm() / reference.norm())


def assert_same_gradients(
    before: GraphModule, after: GraphModule, inputs: Sequence[Any], tolerance: float = 1e-6, noise: float = 1e-7
) -> None:
    """The loss and each gradient agree to `tolerance`; gradients of a norm below `noise` are zero but for rounding."""
    (one_loss, *_), one = outputs_and_gradients(before, inputs)
    (other_loss, *_), other = outputs_and_gradients(after, inputs)
    assert norm_error(other_loss, one_loss) < tolerance
    assert [item is None for item in one] == [item is None for item in other]
    for expected, found in zip(one, other, strict=True):
        if expected is None or found is None:
            continue
        assert found.dtype == expected.dtype
        assert bool(found.norm() < noise) if expected.norm() < noise else norm_error(found, expected) < tolerance
