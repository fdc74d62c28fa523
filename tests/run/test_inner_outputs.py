"""Gradients of outputs of the model from which it computes other outputs: the captured backward does not have them."""

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.run.pieces import torchs_own_backward

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


class Levels(Heads):
    """Returns the loss, the values that it is computed from, and those that these are computed from."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = nn.functional.dropout(torch.tanh(self.body(x)), 0.5)
        found = self.head(hidden)
        return found.square().mean() + hidden.mean(), found, hidden


def both(kind: type[nn.Module], x: Tensor, use: Callable[[nn.Module, tuple[Tensor, ...]], list[Tensor]]) -> None:
    """Compare what `use` returns for a model and its outputs, and the gradients after it, with those of the plain
    model. The latter are rounded otherwise where some come from a second forward, as in the first step here."""
    seen = []
    plain = kind()
    for model in (plain, planned(copy.deepcopy(plain))):
        for _ in range(2):
            torch.manual_seed(2)
            model.zero_grad()
            found = use(model, model(x))
            gradients = [parameter.grad for parameter in model.parameters()]
            seen.append([*found, *(None if one is None else one.clone() for one in gradients)])
    for ours, theirs in zip(seen[2:], seen[:2], strict=True):
        assert [one is None for one in ours] == [one is None for one in theirs]
        of_parameters = len(list(plain.parameters()))
        for one, other in zip(ours[:-of_parameters], theirs[:-of_parameters], strict=True):
            assert one is other is None or torch.equal(one, other)
        torch.testing.assert_close(ours[-of_parameters:], theirs[-of_parameters:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", ["inner", "two", "beside parameters", "unused", "twice"])
def test_a_gradient_by_an_output_that_feeds_another(x: Tensor, asked: str) -> None:
    def use(model: nn.Module, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        loss, found, hidden = outputs
        total = loss + found.square().mean() + hidden.square().sum()
        if asked == "twice":
            first = torch.autograd.grad(loss, hidden, retain_graph=True)
            return [*first, *torch.autograd.grad(total, hidden)]
        elsewhere = torch.ones(1, requires_grad=True)
        inputs = {
            "inner": [hidden],
            "two": [hidden, found],
            "beside parameters": [hidden, found, *model.parameters()],
            "unused": [elsewhere, hidden],
        }[asked]
        return list(torch.autograd.grad(total, inputs, allow_unused=asked == "unused"))[:2]

    with pytest.warns(UserWarning, match="computed by a second run"):
        both(Levels, x, use)


class InPlace(Heads):
    """Writes in place to its outputs."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.head, self.write = nn.Linear(8, 16), write

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden, found = torch.tanh(self.body(x)), self.head(x).clone()
        if self.write == "augmented":
            product = found
            product *= hidden
        if self.write == "through a view":
            found.view(-1).mul_(hidden.view(-1))
        if self.write == "to a row":
            found[0].add_(hidden[0])
        if self.write == "then read":
            hidden = hidden.clone()
            hidden.mul_(found)
            return hidden, hidden * 3, found
        if self.write == "after a read":
            before = found * 2
            found.sigmoid_()
            return found, before, found.sin()
        if self.write == "after a view":
            flat = found.view(-1)
            found.mul_(hidden)
            return found, flat * 2, hidden
        if self.write == "by an argument":
            nn.functional.relu(found, inplace=True)
            return found, found * 2
        return hidden, found


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "write",
    ["augmented", "through a view", "to a row", "then read", "after a read", "after a view", "by an argument"],
)
def test_outputs_that_are_written_in_place(x: Tensor, write: str, first: int) -> None:
    def use(model: nn.Module, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        for one in outputs:
            one.retain_grad()
        sum((one * (number + 2)).square().sum() for number, one in enumerate(outputs[first:])).backward()  # type: ignore[union-attr]
        return [one.grad for one in outputs]  # type: ignore[misc]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both(lambda: InPlace(write), x, use)  # type: ignore[arg-type]


def test_a_gradient_that_is_not_there_is_an_error_as_in_torch(x: Tensor) -> None:
    hidden, found = planned(Heads())(x)
    with pytest.raises(RuntimeError, match="allow_unused=True"), pytest.warns(UserWarning, match="second run"):
        torch.autograd.grad(hidden.sum() + found.sum(), [hidden, torch.ones(1, requires_grad=True)])


def test_backward_to_an_output_that_feeds_another_is_refused(x: Tensor) -> None:
    _, found = (outputs := planned(Heads())(x))
    with pytest.raises(memopt.UnplannedGradientError, match=r"torch.autograd.grad\(loss, output\)"):
        found.sum().backward(inputs=[outputs[0]])


@pytest.mark.parametrize("backward", ["of the loss", "of all", "of values"])
@pytest.mark.parametrize("awaited", ["hook", "kept", "retain_grad", "all"])
def test_the_gradients_of_outputs_that_feed_others(x: Tensor, awaited: str, backward: str) -> None:
    def use(model: nn.Module, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        loss, found, hidden = outputs
        seen: list[Tensor] = []
        for one in (found, hidden):
            if awaited in ("hook", "all"):
                one.register_hook(lambda gradient: seen.append(gradient.norm()))
            if awaited in ("kept", "all"):
                one.register_hook(seen.append)
            if awaited in ("retain_grad", "all"):
                one.retain_grad()
        total = {"of the loss": loss, "of all": loss + found.sin().sum() + hidden.sum(), "of values": found.sum()}
        total[backward].backward()
        retained = [one.grad for one in (found, hidden) if one.retains_grad]
        return [*sorted(seen, key=torch.Tensor.numel), *retained]  # type: ignore[list-item]

    both(Levels, x, use)


def test_a_hook_that_does_not_look_at_the_gradient_costs_nothing(x: Tensor) -> None:
    called = []
    with warnings.catch_warnings(action="error"):
        loss, found = planned(WithLoss())(x)
        found.register_hook(lambda gradient: called.append((gradient.shape, gradient.dtype)))
        loss.backward()
    assert called == [((600, 4), torch.float32)]


def double(gradient: Tensor) -> None:
    gradient.mul_(2)


@pytest.mark.parametrize("change", [torch.neg, double])
@pytest.mark.parametrize("kind", [Heads, WithLoss])
def test_a_hook_that_changes_a_gradient_that_feeds_another_is_refused(
    x: Tensor, kind: type[nn.Module], change: Callable[[Tensor], Tensor | None]
) -> None:
    outputs = planned(kind())(x)
    inner, other = outputs if kind is Heads else reversed(outputs)
    inner.register_hook(change)
    with pytest.raises(memopt.UnplannedGradientError, match="a hook changes the gradient of an output"):
        other.sum().backward()


def test_a_hook_stays_when_its_output_is_gone(x: Tensor) -> None:
    hidden, found = planned(Heads())(x)
    hidden.register_hook(lambda gradient: -gradient)
    del hidden
    with pytest.raises(memopt.UnplannedGradientError, match="a hook changes the gradient of an output"):
        found.sum().backward()


def test_a_hook_that_was_removed_is_not_called(x: Tensor) -> None:
    hidden, found = planned(Heads())(x)
    hidden.register_hook(lambda gradient: -gradient).remove()
    found.sum().backward()


def test_a_hook_beside_a_gradient_that_is_asked_for(x: Tensor) -> None:
    def use(model: nn.Module, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        hidden, found = outputs
        seen: list[Tensor] = []
        hidden.register_hook(lambda gradient: seen.append(gradient.norm()))
        first = torch.autograd.grad(hidden.sin().sum(), hidden, retain_graph=True)
        second = torch.autograd.grad(hidden.sin().sum() + found.sum(), [hidden, model.body.weight])
        return [*seen, *first, *second]

    both(Heads, x, use)


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


def test_what_retain_grad_keeps_beside_a_hook_and_a_gradient_that_is_asked_for(x: Tensor) -> None:
    def use(model: nn.Module, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        hidden, found = outputs
        hidden.retain_grad()
        handle = hidden.register_hook(lambda gradient: 3 * gradient)
        hidden.sin().sum().backward(retain_graph=True)
        changed = hidden.grad.clone()
        handle.remove()
        torch.autograd.grad(hidden.cos().sum() + found.sum(), hidden, retain_graph=True)
        asked = hidden.grad.clone()
        (hidden.square().sum() + found.sum()).backward()
        return [changed, asked, hidden.grad]

    with pytest.warns(UserWarning, match="computed by a second run"):
        both(Heads, x, use)


class Three(Heads):
    """Returns the hidden features with two losses, of which the second one is not computed from the features."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, found = super().forward(x)
        return found.square().mean(), self.body.weight.square().sum() + self.head.weight.sum(), hidden


def test_a_hook_whose_output_gets_no_gradient_by_others(x: Tensor) -> None:
    def use(model: nn.Module, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        _, apart, hidden = outputs
        seen: list[Tensor] = []
        hidden.register_hook(lambda gradient: seen.append(gradient.clone()))
        (apart + hidden.sin().sum() + hidden.exp().sum() + hidden.square().sum()).backward()
        return seen

    both(Three, x, use)


def test_a_hook_that_waits_for_a_backward_through_its_output_alone(x: Tensor) -> None:
    plain = Heads()
    ours = planned(copy.deepcopy(plain))
    for model in (plain, ours):
        hidden, _ = model(x)
        hidden.register_hook(lambda gradient: -gradient)
        hidden.square().sum().backward()
    assert torch.equal(plain.body.weight.grad, ours.body.weight.grad)


def test_torch_has_its_own_function_back_when_no_forward_waits(x: Tensor) -> None:
    own = torchs_own_backward()
    model = planned(Heads())
    gc.disable()
    try:
        for _ in range(3):
            hidden, found = model(x)
            hidden.register_hook(lambda gradient: None)
            (hidden.square().sum() + found.square().sum()).backward()
            del hidden, found
        torch.ones(1, requires_grad=True).sum().backward()
    finally:
        gc.enable()
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


class Equilibrium(nn.Module):
    """Solves its backward in a hook, by derivatives between values of one region."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.body(x) + x)
        start = z.detach().requires_grad_()
        again = torch.tanh(self.body(start) + x.detach())

        def solved(gradient: Tensor) -> Tensor:
            return gradient + torch.autograd.grad(again, start, gradient, retain_graph=True)[0]

        z.register_hook(solved)
        out: Tensor = self.head(z).sum()
        return out


@pytest.mark.plans_always
def test_a_hook_that_takes_a_derivative_inside_of_a_region_is_refused_before_the_first_step(x: Tensor) -> None:
    model = Equilibrium()
    memopt.optimize(model, 1, **EXACT)
    with pytest.raises(memopt.CaptureError, match="cannot be captured"):
        model(x)
    Equilibrium()(x).backward()  # as the plain model trains
