"""Calls in several regions: each run of a region has its place in the plan."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import BudgetError
from memopt.solver import Portfolio
from tests.run.pieces import Blocks, calls_of, gradients, latest, make, session_for

pytestmark = pytest.mark.plans_always  # the plain steps would fit

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
CALL = ((X,), {})


def test_the_capture_sees_both_regions_in_the_order_of_the_forward() -> None:
    model = make(breaks=True)
    call = calls_of(model).recorded.broken.capture(CALL, "a break")
    assert not call.whole
    first, second = (set(run.parameter_ids.values()) for run in call.runs)
    assert first == {id(parameter) for layer in model.layers[:2] for parameter in layer.parameters()}
    assert second == {id(parameter) for layer in model.layers[2:] for parameter in layer.parameters()}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x).tanh()


class Hooked(nn.Module):
    """Dynamo breaks the graph at the hook of one layer, and from the second call on in the other one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), Layer(), Layer())
        self.layers[2].lin.register_full_backward_hook(lambda module, grads, outputs: None)  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


@pytest.mark.parametrize("on_fakes", [False, True])
def test_a_capture_has_the_regions_that_later_calls_run(on_fakes: bool) -> None:
    model = Hooked().train()
    calls = calls_of(model)
    found = calls.planner.capture_on_fakes(CALL, None) if on_fakes else calls.recorded.broken.capture(CALL, "a break")
    for _ in range(2):
        assert calls.recorded.broken.capture(CALL, "a break").places == found.places


class Cast(nn.Module):
    """Assigns a buffer in its forward, where torch 2.13 breaks the graph; a fake tensor in its place is no `nn.Buffer`,
    and does not break it. As CTRL of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale = nn.Buffer(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        self.scale = self.scale.to(x.dtype)
        return self.second(hidden * self.scale).relu().sum()


def test_a_model_that_breaks_on_values_alone_is_planned_as_it_trains() -> None:
    model = Cast().train()
    ahead = memopt.plan(model, 1, (X,), precision="fp32")
    memopt.optimize(model, 1, example_inputs=(X,), precision="fp32")
    assert len(ahead.regions) == len(memopt.plan_of(model).regions)
    assert ahead.smallest_bytes() == memopt.plan_of(model).smallest_bytes()


def test_both_regions_run_by_one_plan_with_the_plain_gradients() -> None:
    model = make(breaks=True)
    calls = calls_of(model)
    for _ in range(2):
        loss = calls(X)
        assert len(latest(calls).regions) == 2
        for found, expected in zip(gradients(model, loss), gradients(model, model(X)), strict=True):
            assert torch.equal(found, expected)


def test_a_plan_that_was_forgotten_is_made_again() -> None:
    model = make(breaks=True)
    calls = calls_of(model)
    calls(X)
    plan = latest(calls)
    calls.recorded.broken.forget()
    calls(X)
    assert latest(calls) is not plan  # planned again from the regions that are recorded
    assert latest(calls) == plan


@pytest.mark.slow
def test_a_call_that_is_refused_leaves_the_plans_of_smaller_ones() -> None:
    model = make(breaks=True)
    calls = calls_of(model, 0.001)
    for _ in range(2):
        calls(X).backward()
        with pytest.raises(BudgetError):
            calls(X.repeat(1000, 1))


def test_sizes_that_another_model_of_the_class_was_called_with_are_no_symbols() -> None:
    for rows in (48, 64, 40):
        call = calls_of(make(breaks=True)).recorded.broken.capture(((X[:rows],), {}), "a break")
        assert not any(region.changing for region in call.regions)


def test_the_solvers_of_a_plan_are_freed_once_it_runs() -> None:
    """Their tables would take more memory than the graphs, for the whole training."""
    model = make(breaks=True)
    session = session_for(model)
    others = portfolios()
    ahead = session.plan((X,))
    assert portfolios() > others  # for its frontier, until it runs
    for _ in range(2):
        session.forward(X).backward()
    assert session.latest is not ahead  # gradients are held now
    gc.collect()
    assert portfolios() == others


def portfolios() -> int:
    return sum(type(one) is Portfolio for one in gc.get_objects())


class Positions(nn.Module):
    """Positions, which have no gradient, are made before a graph break and used after it, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.before(x))
        positions = torch.arange(32.0).sin().expand_as(x).contiguous()
        torch._dynamo.graph_break()
        return torch.tanh(self.after(hidden + positions)).pow(2).mean()


def test_what_has_no_gradient_before_a_break_is_captured_without_one_after_it() -> None:
    torch.manual_seed(0)
    model = Positions().train()
    calls = calls_of(model)
    for found, expected in zip(gradients(model, calls(X)), gradients(model, model(X)), strict=True):
        assert torch.equal(found, expected)


class Reshapes(Blocks):
    """Between two graph breaks, a region that only reshapes its input, as around the experts of Switch Transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.half(x, 0)
        torch._dynamo.graph_break()
        x = x.reshape(32, 2, 32)
        torch._dynamo.graph_break()
        return self.half(x, 2).pow(2).mean()


def test_a_region_of_views_alone_has_no_place_in_the_plan_and_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model = Reshapes().train()
    calls = calls_of(model)
    for _ in range(2):
        for found, expected in zip(gradients(model, calls(X)), gradients(model, model(X)), strict=True):
            assert torch.equal(found, expected)


class InstallsHooks(nn.Module):
    """Installs hooks at its first call, as models of transformers do to collect hidden states, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(32, 32), nn.Linear(32, 32)
        self.installed = False
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: list[torch.Tensor] = []
        if not self.installed:
            self.before.register_forward_hook(lambda module, inputs, output: output * 2)
            self.installed = True
        self.calls.append(len(self.calls))
        states.append(torch.tanh(self.before(x)))
        torch._dynamo.graph_break()
        return self.after(torch.cat(states)).pow(2).mean()


def test_what_a_forward_puts_into_tables_and_lists_is_there_once() -> None:
    torch.manual_seed(0)
    plain = InstallsHooks().train()
    model = copy.deepcopy(plain)
    memopt.plan(model, 1, (X,), precision="fp32", elsewhere_gb=0)
    assert (len(model.before._forward_hooks), model.calls, model.installed) == (0, [], False)
    memopt.optimize(model, 1, example_inputs=(X,), precision="fp32", elsewhere_gb=0)
    for _ in range(2):
        assert model(X) == plain(X)
    assert len(model.before._forward_hooks) == 1
    assert model.calls == plain.calls


class Listed(nn.Module):
    """Runs its layers from a loop that breaks, which Dynamo leaves to Python as a whole: but for the layer that is a
    model of its own, they are in no region."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 32), Layer(), nn.Linear(32, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x.sum()


def test_what_code_between_regions_has_saved_is_not_counted_again_in_the_backward() -> None:
    def step(budget_gb: float) -> None:
        torch.manual_seed(0)
        model = Listed().train()
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=torch.optim.SGD)
        model(torch.randn(512, 64)).backward()

    with pytest.raises(BudgetError) as refused:
        step(0.001)
    step(refused.value.smallest_gb)


class _Reversible(torch.autograd.Function):
    """As in RevTorch: its backward runs the layer again, and a backward of its own, which adds to the parameters'
    gradients."""

    @staticmethod
    def forward(ctx, x, layer):  # type: ignore[no-untyped-def]
        ctx.layer, ctx.half = layer, x.chunk(2, 1)[1].detach()
        with torch.no_grad():
            one, other = x.chunk(2, 1)
            return torch.cat([one + layer(other), other], 1)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        first, second = gradient.chunk(2, 1)
        with torch.enable_grad():
            half = ctx.half.clone().requires_grad_()
            torch.autograd.backward(ctx.layer(half), first)
        return torch.cat([first, second + half.grad], 1), None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(32, 64), Layer(), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        if x.sum() > 1e9:
            x = 2 * x
        reversible: Any = _Reversible.apply
        return self.last(reversible(x, self.inner)).square().mean()


def test_a_backward_within_a_backward_leaves_no_gradients_of_the_capture() -> None:
    """The capture ran it on tensors without values, and the first step added to what it had left."""
    torch.manual_seed(0)
    model = Reversible()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1, precision="fp32", optimizer=None)
    model(X)
    assert all(one.grad is None for one in model.parameters())
    for each in (model, plain):
        each(X).backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
