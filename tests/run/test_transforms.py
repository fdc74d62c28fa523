"""Within transforms of torch.func, forward-mode derivatives and cached parametrisations, a model is the plain model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

import memopt
from memopt.run.session import session_of

pytestmark = pytest.mark.plans_always


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    found = torch.func.grad(lambda given: functional_call(model, given, (x,)).square().sum())(weights)
    return torch.cat([one.flatten() for one in found.values()])


def for_each_sample(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(lambda one: model(one[None]))(x)


def tangent(model: nn.Module, x: Tensor) -> Tensor:
    return jvp(model, (x,), (torch.ones_like(x),))[1]


def dual(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


@pytest.mark.parametrize("derivative", [gradients, for_each_sample, tangent, dual])
def test_a_call_within_a_transform(derivative: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(5, 8)
    ours = memopt.optimize(copy.deepcopy(plain), 1, optimizer=None, precision="fp32", allow={"recompute"})
    for _ in range(2):  # before and after a planned step
        with pytest.warns(UserWarning, match="Sequential was called within a transform of torch.func"):
            assert torch.equal(derivative(ours, x), derivative(plain, x))
        for model in (plain, ours):
            model(x).square().sum().backward()
    assert memopt.plan_of(ours) is not None
    assert torch.equal(ours[0].weight.grad, plain[0].weight.grad)


def test_several_gradients_at_once() -> None:
    model, x = nn.Linear(8, 4), torch.randn(5, 8, requires_grad=True)
    memopt.optimize(model, 1, optimizer=None, precision="fp32", allow={"recompute"})
    with pytest.raises(memopt.UnplannedGradientError, match="for several gradients at once"):
        torch.autograd.grad(model(x).sum(), x, torch.ones(3), is_grads_batched=True)


@pytest.mark.filterwarnings("error")
def test_fast_weights_are_no_step_and_give_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MAML has them: other tensors stand in the place of the parameters, whose own values are as before."""
    monkeypatch.delenv("MEMOPT_PLAN", raising=False)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 8)
    memopt.optimize(model, 1, optimizer=torch.optim.SGD(model.parameters(), 0.1), elsewhere_gb=0)
    weights = dict(model.named_parameters())
    loss = functional_call(model, weights, (x,)).square().mean()
    found = torch.autograd.grad(loss, list(weights.values()))
    fast = {name: weight - 0.1 * one for (name, weight), one in zip(weights.items(), found, strict=True)}
    entry = session_of(model).share.entry  # type: ignore[union-attr]
    stepped = []
    handle = model[1].register_forward_hook(lambda *_: stepped.append(entry.stepped))
    functional_call(model, fast, (x,)).square().mean().backward()
    handle.remove()
    assert not any(stepped)
    assert not entry.stepped


@pytest.mark.parametrize("always", [False, True])
def test_calls_that_share_weights_of_a_parametrization(monkeypatch: pytest.MonkeyPatch, *, always: bool) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always" if always else "")
    torch.manual_seed(0)
    plain, x = nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4)), torch.randn(5, 8)
    ours = memopt.optimize(copy.deepcopy(plain), 1, optimizer=None, precision="fp32", allow={"recompute"})
    for _ in range(2):
        for model in (plain, ours):
            with parametrize.cached():
                (model(x) * model(2 * x)).sum().backward()
    ours_state = ours.state_dict()
    assert all(torch.equal(value, ours_state[name]) for name, value in plain.state_dict().items())
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
