"""The contents of a recorded region, and the facts that are derived from them later."""

from __future__ import annotations

import torch
from torch import nn

from memopt.capture.captured_call import CapturedCall, RegionRun
from tests.capture.recorded import recorded


class Scores(nn.Module):
    """Returns a loss and the scores that it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layer(x)
        return scores.pow(2).mean(), scores


def test_outputs_beside_the_loss_are_detached_unless_all_are_differentiated() -> None:
    model, x = Scores().train(), torch.randn(2, 4)
    assert recorded(model, x).undifferentiated == {1}
    assert recorded(model, x, differentiate_all=True).undifferentiated == frozenset()


def test_parameters_are_known_by_the_number_of_their_input() -> None:
    model = Scores().train()
    region = recorded(model, torch.randn(2, 4))
    assert set(region.parameter_ids.values()) == {id(model.layer.weight), id(model.layer.bias)}
    values = [region.inputs[number] for number in region.parameters]
    assert {tuple(value.shape) for value in values} == {(4, 4), (4,)}


def test_a_region_without_gradients_is_recognised() -> None:
    model = Scores().train().requires_grad_(False)
    assert not recorded(model, torch.randn(2, 4)).differentiable
    assert recorded(model.requires_grad_(), torch.randn(2, 4)).differentiable


def test_the_operator_graph_is_traced_once() -> None:
    region = recorded(Scores().train(), torch.randn(2, 4))
    graph = region.operator_graph()
    assert region.operator_graph() is graph
    assert "aten.linear.default" in str(graph.module.graph)


def test_gradients_of_hooked_parameters_and_of_those_that_several_runs_read_are_not_added_in_place() -> None:
    region = recorded(Scores().train(), torch.randn(2, 4))
    (shared, own), other = region.parameter_ids, 7
    call = CapturedCall((RegionRun(region, {shared: 1, own: 2}), RegionRun(region, {shared: 1, own: other})), "a break")
    assert call.parameters_of_runs() == ({own}, {own})
    assert call.parameters_of_runs({other}) == ({own}, frozenset())
    assert not call.whole
    assert CapturedCall.of(region).parameters_of_runs() == (region.parameters,)
