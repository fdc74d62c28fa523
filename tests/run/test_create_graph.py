"""Gradients of gradients that a loop asks for through a planned forward, in some of its steps."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt

pytestmark = [
    pytest.mark.plans_always,
    pytest.mark.filterwarnings("ignore:create_graph=True asks for gradients of gradients:UserWarning"),
]
EXACT = {"optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}}
ROWS, WIDTH, EVERY = 64, 16, 3


class Critic(nn.Module):
    """With running statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Softplus(), nn.Dropout(0.2), nn.Linear(32, 32)
        self.net = nn.Sequential(*layers, nn.Softplus(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def slope_penalty(critic: nn.Module, real: Tensor) -> tuple[Tensor, Tensor]:
    """StyleGAN's R1, and the values that it differentiates."""
    real.requires_grad_()
    values = critic(real)
    (slope,) = torch.autograd.grad(values.sum(), real, create_graph=True)
    return slope.square().sum(1).mean(), values


def lazily(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    penalty, values = slope_penalty(critic, real)
    return EVERY * penalty + 0 * values[0].sum()


def beside_two_forwards(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP: two forwards wait while the third one is differentiated, by an input that is computed."""
    scale = torch.ones(1, requires_grad=True)
    loss = critic(fake).mean() - critic(real).mean()
    between = (real + fake) * scale
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return loss + (slope.norm(2, dim=1) - 1).square().mean()


def of_parameters(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """The norm of the gradient of all parameters."""
    gradients = torch.autograd.grad(critic(real).mean(), list(critic.parameters()), create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


def beside_its_loss(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    penalty, values = slope_penalty(critic, real)
    return penalty + F.softplus(values).mean()


def product_with_hessian(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """By some parameters alone, of a loss that is trained by itself, too."""
    weights = [parameter for parameter in critic.parameters() if parameter.dim() > 1]
    loss = F.softplus(-critic(real)).mean()
    slopes = torch.autograd.grad(loss, weights, create_graph=True)
    products = torch.autograd.grad(slopes, weights, [torch.ones_like(one) for one in slopes], create_graph=True)
    return loss + critic(fake).mean() + 0.01 * sum(product.square().sum() for product in products)


def twice(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """A second derivative, as of an equation that a network solves."""
    real.requires_grad_()
    (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), real, create_graph=True)
    return bend.square().mean()


class Generator(nn.Module):
    """Returns images, and the latents that they are computed from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mapping = nn.Sequential(nn.Linear(WIDTH, 32), nn.Softplus())
        self.synthesis = nn.Sequential(nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latents = self.mapping(x)
        return self.synthesis(latents), latents


def paths(generator: nn.Module) -> list[Tensor]:
    """Weights after steps of which some penalise the slope of images by latents, as StyleGAN2's do."""
    stepping = torch.optim.SGD(generator.parameters(), 0.1)
    torch.manual_seed(1)
    for step in range(2 * EVERY):
        stepping.zero_grad()
        images, latents = generator(torch.randn(ROWS, WIDTH))
        loss = images.square().mean()
        if step % EVERY == EVERY - 1:
            given = (images * torch.randn_like(images)).sum() + latents.square().sum()
            (slope,) = torch.autograd.grad(given, latents, create_graph=True)
            loss = slope.square().sum(1).mean() + 0 * images[0, 0]
        loss.backward()
        stepping.step()
    return list(generator.parameters())


def test_by_an_output_that_feeds_another() -> None:
    plain = Generator()
    planned = memopt.optimize(copy.deepcopy(plain), 1, **EXACT)
    torch.testing.assert_close(paths(planned), paths(plain))


def trained(critic: nn.Module, regularised: Callable[..., Tensor]) -> list[Tensor]:
    """The penalties, weights and buffers of a few steps of which every `EVERY`th one has a penalty."""
    stepping, found = torch.optim.SGD(critic.parameters(), 0.1), []
    torch.manual_seed(1)
    for step in range(2 * EVERY + 1):
        real, fake = torch.randn(2, ROWS, WIDTH, dtype=next(critic.parameters()).dtype).unbind()
        real, fake = real.clone(), fake + 1
        stepping.zero_grad()
        (F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()).backward()
        stepping.step()
        if step % EVERY == EVERY - 1:
            stepping.zero_grad()
            penalty = regularised(critic, real, fake)
            penalty.backward()
            stepping.step()
            found.append(penalty.detach())
    return [*found, *critic.state_dict().values()]


@pytest.mark.parametrize("regularised", [lazily, beside_two_forwards, of_parameters, twice])
def test_every_few_steps(regularised: Callable[..., Tensor]) -> None:
    plain = Critic()
    planned = memopt.optimize(copy.deepcopy(plain), 1, **EXACT)
    theirs, ours = trained(plain, regularised), trained(planned, regularised)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert memopt.status(planned).state is memopt.State.PLANNED


@pytest.mark.parametrize("regularised", [beside_its_loss, product_with_hessian])
def test_beside_a_loss_of_the_same_forward(regularised: Callable[..., Tensor]) -> None:
    """Gradients by both forwards are summed at the leaves."""
    plain = Critic().double()
    planned = memopt.optimize(copy.deepcopy(plain), 1, optimizer=None, allow={"recompute"}, precision="fp32")
    torch.testing.assert_close(trained(planned, regularised), trained(plain, regularised))


def stepped(critic: nn.Module) -> None:
    """Write to a parameter, as a step does: from then on no derivative is refused."""
    with torch.no_grad():
        next(critic.parameters()).mul_(0.5)


def test_where_no_second_forward_is_possible() -> None:
    """The derivative is refused, and the step before it goes on as if it had not been asked for."""
    planned = memopt.optimize(Critic(), 1, **EXACT)
    real = torch.randn(ROWS, WIDTH)
    planned(real).mean().backward()
    values = planned(real)
    with torch.no_grad():
        next(planned.parameters()).add_(1)
    with pytest.raises(
        memopt.UnplannedGradientError, match=r"have changed since its forward; take the derivative in a loss_fn"
    ):
        torch.autograd.grad(values.sum(), list(planned.parameters()), create_graph=True)


def test_a_later_backward_runs_what_an_earlier_one_passed_over() -> None:
    plain, grads = Critic(), []
    for critic in (plain, memopt.optimize(copy.deepcopy(plain), 1, **EXACT)):
        torch.manual_seed(1)
        real = torch.randn(ROWS, WIDTH)
        critic(real).mean().backward()
        stepped(critic)
        values = critic(real)
        torch.autograd.grad(values.sum(), list(critic.parameters()), create_graph=True)
        critic.zero_grad()
        values.mean().backward()
        grads.append([parameter.grad for parameter in critic.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_an_input_that_only_the_forward_holds() -> None:
    """As of `model(batch.to(device))`: the second forward takes what the first one has saved of it."""
    plain, found = Critic(), []
    for critic in (plain, memopt.optimize(copy.deepcopy(plain), 1, **EXACT)):
        torch.manual_seed(1)
        critic(torch.randn(ROWS, WIDTH)).mean().backward()
        stepped(critic)
        values = critic(torch.randn(ROWS, WIDTH))
        found.append(torch.autograd.grad(values.sum(), list(critic.parameters()), create_graph=True))
    assert all(map(torch.equal, *found))


class Squared(nn.Module):
    """Whose backward reads nothing of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale.square()


def test_an_input_that_its_caller_frees_is_not_kept() -> None:
    """A plan does not count it until the backward; a derivative of the second order then says what is missing."""
    planned = memopt.optimize(Squared(), 1, **EXACT)
    planned(torch.randn(ROWS, WIDTH)).mean().backward()
    stepped(planned)
    given = torch.randn(ROWS, WIDTH)
    values, freed = planned(given), weakref.ref(given)
    del given
    assert freed() is None
    with pytest.raises(memopt.UnplannedGradientError, match="an input of its forward was freed"):
        torch.autograd.grad(values.sum(), list(planned.parameters()), create_graph=True)
