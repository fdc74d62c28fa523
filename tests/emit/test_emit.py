"""An emitted region has the plain model's gradients, whatever its schedule recomputes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

import memopt
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NOTHING
from memopt.emit.emit import Emitted, emit_region
from memopt.emit.gradients import Accumulation
from memopt.planning.schedule_parts import RegionSchedule
from memopt.rewrite.trace import trace
from passes.graphs.node_facts import backward_nodes, is_tangent
from tests.capture.recorded import recorded


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)).pow(2).mean()


def schedules(joint: JointGraph) -> list[RegionSchedule]:
    """Two schedules: one that recomputes nothing, and one that recomputes the whole forward at the start of the
    backward."""
    calls = [node for node in joint.module.graph.nodes if node.op not in ("placeholder", "output")]
    late = backward_nodes(joint.module.graph)
    backward = [node.name for node in calls if node in late]
    forward = [node.name for node in calls if node not in late and not is_tangent(node)]
    return [
        RegionSchedule(joint.fingerprint, (*forward, *backward), len(forward)),
        RegionSchedule(joint.fingerprint, (*forward, *forward, *backward), len(forward)),
    ]


def given(joint: JointGraph, model: Squares, x: torch.Tensor) -> list[torch.Tensor]:
    by_id = {id(parameter): parameter for parameter in model.parameters()}
    region = joint.trace.region
    return [by_id.get(region.parameter_ids.get(number, 0), x) for number in range(len(region.inputs))]


@pytest.mark.parametrize("choose", [lambda both: both[0], lambda both: both[1]], ids=["saved", "recomputed"])
def test_gradients_are_the_plain_models(choose: Callable[[list[RegionSchedule]], RegionSchedule]) -> None:
    torch.manual_seed(0)
    model, x = Squares().train(), torch.randn(8, 4)
    joint = trace(recorded(model, x), NOTHING)
    emitted: Emitted = emit_region(joint, choose(schedules(joint)), Accumulation(), {})
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    for _ in range(2):  # the second time gradients are added to those of the first
        (loss,) = emitted.run(*given(joint, model, x))
        loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)  # type: ignore[arg-type]
    assert emitted.footprint is None


@pytest.mark.slow
def test_a_forward_compiled_by_inductor_draws_again_what_it_has_drawn() -> None:
    """Inductor runs each graph on fake tensors first, where torch's operator returns a generator state that is real."""

    class Dropped(Squares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.dropout(self.layer(x), 0.5, True).pow(2).mean()

    model, x = Dropped().train(), torch.randn(8, 4)
    with inductor_config.patch(fallback_random=True, force_disable_caches=True):
        joint = trace(recorded(model, x), NOTHING, "inductor")
        recomputed = schedules(joint)[1]
        in_forward = replace(recomputed, boundary=2 * recomputed.boundary)
        emitted: Emitted = emit_region(joint, in_forward, Accumulation(), {})
    found = []
    for step in (model, lambda _: emitted.run(*given(joint, model, x))[0]):
        torch.manual_seed(0)
        loss = step(x)
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters())), torch.rand(1)))
    torch.testing.assert_close(found[1], found[0])


def test_what_a_forward_draws_is_an_input_of_its_backward() -> None:
    """Rows are gathered by a drawn permutation: the joint graph draws it, and the backward alone is given it."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = 2 * (self.scale * x).sin()
            return (0.3 * y + 0.7 * y[torch.randperm(len(x))]).square().mean()

    x, model = torch.randn(64, 512), Mixed()
    torch.manual_seed(1)
    model(x).backward()
    expected, model.scale.grad = model.scale.grad, None
    memopt.optimize(model, 0.01, precision="fp32", allow={"recompute", "reinplace"}, example_inputs=(x,))
    torch.manual_seed(1)
    model(x).backward()
    assert model.scale.grad is not None
    assert expected is not None
    assert torch.equal(model.scale.grad, expected)
