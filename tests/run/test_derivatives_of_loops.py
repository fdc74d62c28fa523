"""Derivatives that a loop takes of a forward that runs plain: the step is counted with as many as it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import memopt
from memopt.errors import GIB

EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
ROWS, STEPS = 600, 4


def equation(model: nn.Module) -> Tensor:
    """Burgers' equation, whose derivatives are taken one by one, and a second forward at its boundary."""
    x, t = (torch.rand(ROWS, 1, requires_grad=True) for _ in range(2))
    u = model(torch.cat([x, t], 1))
    u_x, u_t = grad(u.sum(), x, create_graph=True)[0], grad(u.sum(), t, create_graph=True)[0]
    u_xx = grad(u_x.sum(), x, create_graph=True)[0]
    return (u_t + u * u_x - u_xx).square().mean() + model(torch.rand(ROWS // 8, 2)).square().mean()


def only_derivatives(model: nn.Module) -> Tensor:
    """The third derivative alone, so that the last backward does not begin at the output of the forward."""
    x = torch.rand(ROWS, 2, requires_grad=True)
    found = model(x)
    for _ in range(3):
        found = grad(found.sum(), x, create_graph=True)[0]
    return found.square().mean()


def penalty(model: nn.Module) -> Tensor:
    """WGAN-GP: two forwards wait while the third one is differentiated."""
    real, fake = torch.rand(2, ROWS, 2)
    loss = model(fake).mean() - model(real).mean()
    between = ((real + fake) / 2).requires_grad_()
    (slope,) = grad(model(between).sum(), between, create_graph=True)
    return loss + 10 * (slope.norm(dim=1) - 1).square().mean()


def regularised_beside_its_loss(model: nn.Module) -> Tensor:
    """R1 after a backward of the same step."""
    model(torch.rand(ROWS, 2)).mean().backward()
    real = torch.rand(ROWS, 2, requires_grad=True)
    (slope,) = grad(model(real).sum(), real, create_graph=True)
    return slope.square().sum(1).mean()


def balanced(model: nn.Module) -> Tensor:
    """As GradNorm: a derivative by the weight of one layer alone."""
    loss = model(torch.rand(ROWS, 2)).square().mean()
    (gradient,) = grad(loss, list(model.parameters())[-2], create_graph=True)
    return loss + gradient.norm()


def scores(model: nn.Module) -> Tensor:
    """Sliced score matching, in a loop that begins each step with the gradients of the one before."""
    x = torch.rand(ROWS, 2, requires_grad=True)
    values = model(x)
    (slope,) = grad(values.sum(), x, create_graph=True)
    return (slope.square().sum(1) + values.square().sum(1)).mean()


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    gc.collect()


def trained(loss_of: Callable[[nn.Module], Tensor], budget: float | None = None) -> tuple[list[float], list[int]]:
    """The losses and the peaks of some steps."""
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(48, 48), nn.Tanh())]
    model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), *layers, nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters())
    if budget is not None:
        memopt.optimize(model, budget / GIB, optimizer=optimizer, **EXACT)
    losses, peaks = [], []
    for _ in range(STEPS):
        with memopt.measure_peak("cpu") as peak:
            if loss_of is not scores:
                optimizer.zero_grad()
            loss = loss_of(model)
            if loss_of is scores:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        del loss
        peaks.append(peak.bytes)
    return losses, peaks


@pytest.mark.slow
@pytest.mark.parametrize(
    "share", [pytest.param(0.4, marks=pytest.mark.slow), 0.7, pytest.param(0.9, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("loss_of", [equation, only_derivatives, penalty, regularised_beside_its_loss, scores])
def test_no_step_exceeds_its_budget(loss_of: Callable[[nn.Module], Tensor], share: float) -> None:
    """A refusal comes in the first step, and ends no training."""
    plain, plain_peaks = trained(loss_of)
    budget, peaks = share * max(plain_peaks), list[int]()
    for _ in range(4):
        try:
            losses, peaks = trained(loss_of, budget)
            break
        except memopt.BudgetError as refused:
            budget = refused.smallest_bytes
        gc.collect()
    assert losses == plain
    assert max(peaks) <= budget <= 1.06 * max(plain_peaks)


@pytest.mark.parametrize("share", [0.7, 0.95])
def test_a_derivative_by_the_weight_of_one_layer_is_counted_as_such(share: float) -> None:
    """Where the first step is planned, and where it runs plain."""
    _, plain_peaks = trained(balanced)
    with pytest.raises(memopt.BudgetError) as refused:
        trained(balanced, share * max(plain_peaks))
    while "create_graph=True" not in str(refused.value):
        budget = refused.value.smallest_bytes
        with pytest.raises(memopt.BudgetError) as refused:
            trained(balanced, budget)
    assert refused.value.smallest_bytes < 1.4 * max(plain_peaks)  # by all parameters it takes 2.6 times as much


def test_a_step_of_larger_sizes_is_warned_of_where_it_goes_on_beyond_the_budget() -> None:
    model = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 1))

    def step(rows: int) -> int:
        with memopt.measure_peak("cpu") as peak:
            x = torch.rand(rows, 2, requires_grad=True)
            grad(model(x).sum(), x, create_graph=True)[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return peak.bytes

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    budget = 1.1 * step(ROWS)
    memopt.optimize(model, budget / GIB, optimizer=optimizer, **EXACT)
    step(ROWS)
    with pytest.warns(UserWarning, match=r"create_graph=True; training goes on") as warned:
        assert max(step(2 * ROWS) for _ in range(2)) > budget
    assert len(warned) == 1
    assert "beyond the budget" in str(memopt.status(model))
    with pytest.warns(UserWarning, match=r"create_graph=True; training goes on"):
        step(3 * ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", [equation, penalty, regularised_beside_its_loss, scores])
def test_a_named_budget_works(loss_of: Callable[[nn.Module], Tensor]) -> None:
    _, plain_peaks = trained(loss_of)
    with pytest.raises(memopt.BudgetError, match="create_graph=True") as refused:
        trained(loss_of, 0.8 * max(plain_peaks))
    budget = refused.value.smallest_bytes
    del refused
    gc.collect()
    trained(loss_of, budget)
