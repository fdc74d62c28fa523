"""Tracing of recorded regions into joint graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.capture.captured_call import CapturedCall, RegionRun
from memopt.capture.joint import accumulating, lay_out_again, trace_by_inductor
from memopt.capture.operators import (
    NOTHING,
    Decision,
    NothingToRewrite,
    OperatorGraph,
    Operators,
    Rewriting,
    to_differentiate,
)
from memopt.errors import CaptureError
from memopt.rewrite.trace import trace, trace_call
from passes import Pipeline
from passes.graphs.node_facts import is_tangent
from passes.graphs.verify import verify
from tests.capture.recorded import recorded
from tests.passes.capture import Sketch, aten


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


def idle(graph: OperatorGraph) -> Decision:
    return Decision(Pipeline((), label="idle"), notes=("there is nothing to do",))


def test_the_same_region_is_traced_to_the_same_graph() -> None:
    region = recorded(Squares().train(), torch.randn(2, 4))
    first, second = trace(region, NOTHING), trace(region, NOTHING)
    assert first.fingerprint == second.fingerprint
    assert first.parameter_inputs == region.parameters
    assert first.trace.region is region


class Weighted(Squares):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).pow(2).mean()


def test_a_constant_is_no_input_of_inductors_joint_graph() -> None:
    """The numbers of parameters are those of the region's inputs."""
    region = recorded(Weighted().train(), torch.randn(2, 4))
    module = to_differentiate(Operators((region.operator_graph().module,)))
    with region.tracing():
        joint = trace_by_inductor(module, region.inputs).module
    assert joint is not None
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if not is_tangent(node)]
    assert [node.meta["val"].shape for node in inputs] == [given.shape for given in region.inputs]


def test_a_region_without_gradients_is_not_differentiated() -> None:
    joint = trace(recorded(Squares().train().requires_grad_(False), torch.randn(2, 4)), NOTHING)
    assert not joint.differentiated


def test_a_call_that_depends_on_no_parameter_is_refused() -> None:
    region = recorded(Squares().train().requires_grad_(False), torch.randn(2, 4))
    with pytest.raises(CaptureError, match="depends on no trainable parameter"):
        trace_call(CapturedCall.of(region), NOTHING)


def test_a_needed_decision_without_passes_is_refused() -> None:
    region = recorded(Squares().train(), torch.randn(2, 4))
    rewriting = Rewriting(deciders=(idle,), needed="idle")
    for call in (CapturedCall.of(region), CapturedCall((RegionRun(region, region.parameter_ids),), "a break")):
        with pytest.raises(NothingToRewrite, match="there is nothing to do"):
            trace_call(call, rewriting)


def test_hooked_parameters_are_left_to_autograd() -> None:
    model = Squares().train()
    call = CapturedCall.of(recorded(model, torch.randn(2, 4)))
    (joint,) = trace_call(call, NOTHING)
    (hooked,) = accumulating((joint,), call, {id(model.layer.weight)})
    assert len(joint.parameter_inputs) == 2
    assert len(hooked.parameter_inputs) == 1


def test_values_behind_a_padded_product_are_laid_out_as_they_are() -> None:
    """As where inductor pads a product of 13 columns to 16 and takes a slice of it."""
    sketch = Sketch()
    a, b = sketch.input("a", 6, 8), sketch.input("b", 8, 16)
    product = sketch.call(aten.mm.default, a, b)
    whole = sketch.call(aten.view.default, product, [2, 3, 16])
    cut = sketch.call(aten.slice.Tensor, whole, 2, 0, 13)
    twice = sketch.call(aten.mul.Tensor, cut, 2)
    rows = sketch.call(aten.reshape.default, cut, [6, 13])
    rows.target = aten.view.default
    flat = sketch.call(aten.reshape.default, cut, [78])
    flat.target = aten.view.default
    graph = sketch.returns(twice, rows, flat).graph
    stored = twice.meta["val"]
    with sketch.mode:
        rows.meta["val"] = torch.empty(6, 13)
    lay_out_again(graph)
    assert rows.meta["val"].stride() == (16, 1)
    assert twice.meta["val"] is stored
    assert (flat.target, flat.meta["val"].stride()) == (aten.reshape.default, (1,))


class WrittenOut(nn.Module):
    """Attention without dropout as matrix products and a softmax, which inductor replaces by one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.layer(x).chunk(3, dim=-1))
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(dim=-1)
        return (weights @ v).permute(0, 2, 1, 3).contiguous().flatten(2).square().mean()


def test_values_behind_an_attention_of_inductor_are_laid_out_as_they_are() -> None:
    module = trace(recorded(WrittenOut().train(), torch.randn(2, 4, 16)), NOTHING, "inductor").module
    assert [node for node in module.graph.nodes if "scaled_dot_product" in node.name]
    verify(module)
