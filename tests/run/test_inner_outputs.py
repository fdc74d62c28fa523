"""Gradients by outputs of the model from which it computes other outputs: the captured backward does not have them, and
says so, where they would be silently wrong."""

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt

pytestmark = pytest.mark.plans_always
EXACT = {"optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}}


class Heads(nn.Module):
    """Returns hidden features, and what a head makes of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return hidden, self.head(hidden)


class WithLoss(Heads):
    """Returns the loss and the values that it is computed from."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, found = super().forward(x)
        return found.square().mean(), found


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(600, 8)


def planned(model: nn.Module) -> nn.Module:
    return memopt.optimize(model, 1, **EXACT)


@pytest.mark.parametrize("unused", [False, True])
def test_a_gradient_by_an_output_that_feeds_another(x: Tensor, unused: bool) -> None:
    hidden, found = planned(Heads())(x)
    with pytest.raises(memopt.UnplannedGradientError, match=r"gradient by an output of shape \(600, 16\)"):
        torch.autograd.grad(hidden.sum() + found.sum(), hidden, allow_unused=unused)
    with pytest.raises(memopt.UnplannedGradientError, match="gradient by an output"):
        found.sum().backward(inputs=[hidden])


@pytest.mark.parametrize("kind", [Heads, WithLoss])
@pytest.mark.parametrize("awaited", ["hook", "retain_grad"])
def test_a_hook_on_an_output_that_feeds_another(x: Tensor, kind: type[nn.Module], awaited: str) -> None:
    outputs = planned(kind())(x)
    inner, other = outputs if kind is Heads else reversed(outputs)
    if awaited == "hook":
        inner.register_hook(lambda gradient: -gradient)
    else:
        inner.retain_grad()
    with pytest.raises(memopt.UnplannedGradientError, match="waits for the gradient of an output"):
        other.sum().backward()


def test_a_hook_stays_when_its_output_is_gone(x: Tensor) -> None:
    hidden, found = planned(Heads())(x)
    hidden.register_hook(lambda gradient: -gradient)
    del hidden
    with pytest.raises(memopt.UnplannedGradientError, match="waits for the gradient of an output"):
        found.sum().backward()


def test_gradients_by_outputs_beside_others_are_those_of_the_plain_model(x: Tensor) -> None:
    plain = Heads()
    ours = planned(copy.deepcopy(plain))
    seen = []
    for model in (plain, ours):
        hidden, found = model(x)
        (slope,) = torch.autograd.grad(hidden.square().sum(), hidden, create_graph=True)
        found.register_hook(lambda gradient: 2 * gradient)
        (slope.square().sum() + found.square().sum()).backward()
        seen.append([slope.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))


def test_a_hook_that_waits_for_a_backward_through_its_output_alone(x: Tensor) -> None:
    plain = Heads()
    ours = planned(copy.deepcopy(plain))
    for model in (plain, ours):
        hidden, _ = model(x)
        hidden.register_hook(lambda gradient: -gradient)
        hidden.square().sum().backward()
    assert torch.equal(plain.body.weight.grad, ours.body.weight.grad)


def test_torch_has_its_own_function_back_when_no_forward_waits(x: Tensor) -> None:
    own = torch.autograd.graph._engine_run_backward
    model = planned(Heads())
    for _ in range(3):
        sum(one.square().sum() for one in model(x)).backward()
    assert torch.autograd.graph._engine_run_backward is own


class Broken(nn.Module):
    """Takes a derivative between values of one region, in code that is not captured."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        energy = hidden.square().sum()
        torch._dynamo.graph_break()
        slopes = torch.autograd.grad(energy, hidden, create_graph=True, allow_unused=True)
        return energy + sum(slope.sin().sum() for slope in slopes if slope is not None)


def test_a_derivative_across_a_break_is_refused(x: Tensor) -> None:
    with pytest.raises(memopt.CaptureError, match="takes a derivative through that break"):
        memopt.optimize(Broken(), 1, example_inputs=(x,), **EXACT)
