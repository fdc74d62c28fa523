"""Modules that take gradients are replaced by operators, which work while their backward runs."""

from __future__ import annotations

import torch
from torch import nn

from memopt.compat.autograd import Fate
from memopt.emit.gradients import Accumulation, accumulate_in_place
from memopt.emit.inductor import _Handing
from tests.passes.capture import Sketch, aten


def handing() -> tuple[_Handing, torch.fx.GraphModule]:
    sketch = Sketch()
    x, y = sketch.input("x", 3), sketch.input("y", 3)
    module = sketch.returns(sketch.call(aten.mul.Tensor, x, y), sketch.call(aten.add.Tensor, x, y))
    accumulate_in_place(module, {1: 0}, Accumulation())
    return _Handing(module), module


def run(parameter: nn.Parameter, fate: Fate) -> list[torch.Tensor | None]:
    made, module = handing()
    made.modules[0].receiver = lambda: (parameter, fate)  # type: ignore[method-assign]

    def computed(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        results = module(*arguments)
        assert results[1].numel() == 0
        return results

    return made.taking(computed)([torch.ones(3), torch.full((3,), 2.0)])


def test_a_gradient_is_added_and_not_returned() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    results = run(parameter, Fate.ACCUMULATED)
    assert results[0] is not None
    assert results[1] is None
    assert torch.equal(parameter.grad, torch.full((3,), 4.0))


def test_a_gradient_that_somebody_waits_for_is_passed_on() -> None:
    results = run(nn.Parameter(torch.zeros(3)), Fate.RETURNED)
    assert torch.equal(results[1], torch.full((3,), 3.0))


def test_the_graph_calls_operators_and_no_modules() -> None:
    made, module = handing()
    assert made.numbers == [-1, 0]
    assert not list(module.children())
    assert not module.graph.find_nodes(op="call_module")
