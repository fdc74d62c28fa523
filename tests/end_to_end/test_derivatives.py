"""Steps that take derivatives themselves, in the forward or in a loss of the model and the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from examples.models import derivatives as models
from examples.models.derivatives import POTENTIALS, SchNet, Strained, grad, losses, molecules
from memopt.account.account import distinct_bytes
from memopt.compat.operators import tree_leaves, tree_map
from tests.end_to_end.pieces import GIB, assert_same, run, same
from tests.marks import slow

pytestmark = pytest.mark.plans_always  # the plain steps would fit

EXACT: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}}
X = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))


def fresh(batch: Any) -> Any:
    """A copy of a batch, since forwards make inputs require gradients."""
    return tree_map(lambda value: value.detach().clone(), batch)


def step(model: nn.Module, batch: Any, loss: Callable[..., Any] | None = None) -> list[Any]:
    """Train one step on a copy of the batch; return the loss and what happened to the inputs."""
    given = fresh(batch)
    torch.manual_seed(1)
    value = loss(model, given) if loss else model(**given)
    value.backward()
    inputs = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
    return [value.detach(), *((one.requires_grad, one.grad) for one in inputs)]


def optimised(model: nn.Module, budget_gb: float = 1.0, **options: Any) -> nn.Module:
    return memopt.optimize(copy.deepcopy(model), budget_gb, **{**EXACT, **options})


def check(model: nn.Module, batch: dict[str, Tensor], *, steps: int = 1) -> nn.Module:
    """Assert that steps of the optimised model are bitwise those of the plain one; return the optimised one."""
    plain, ours = copy.deepcopy(model), optimised(model)
    for _ in range(steps):
        expected = run(plain, lambda model: step(model, batch), batch)
        assert_same(run(ours, lambda model: step(model, batch), batch), expected)
    assert memopt.status(ours).state is memopt.State.PLANNED
    return ours


@pytest.mark.parametrize(
    "kind", [kind if kind in (SchNet, Strained) else slow(kind) for kind in POTENTIALS], ids=lambda kind: kind.__name__
)
def test_forces_are_bitwise_those_of_the_plain_model(kind: type[nn.Module]) -> None:
    check(kind(), molecules())


SIZES = (40, 200), (50, 260), (30, 120), (47, 233)


@pytest.mark.parametrize("count", [3, slow(4)])
def test_molecules_of_changing_sizes(count: int) -> None:
    model = SchNet()
    ours = optimised(model)
    for atoms, edges in SIZES[:count]:
        batch = molecules(atoms, edges)
        expected = run(copy.deepcopy(model), lambda model, batch=batch: step(model, batch), batch)  # type: ignore[misc]
        ours.zero_grad()
        assert_same(run(ours, lambda model, batch=batch: step(model, batch), batch), expected)  # type: ignore[misc]


class Derived(nn.Module):
    """A network, and a loss of its derivatives by `kind`."""

    def __init__(self, kind: Callable[[Derived, Tensor], Tensor], net: nn.Module | None = None) -> None:
        super().__init__()
        self.kind, self.net = kind, net or models.network(2, layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(self, x)


def loss_of(value: Tensor, *derivatives: Tensor) -> Tensor:
    return value.mean() + sum(one.square().mean() for one in derivatives)


def of_input(self: Derived, x: Tensor) -> Tensor:
    before = x * 3
    x.requires_grad_()  # from here on
    u = self.net(x + before)
    return loss_of(u, *grad(u.sum(), x, create_graph=True))


def of_intermediate(self: Derived, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    u = self.net(x)
    return loss_of(u, *grad(u.sum(), x, create_graph=True))


def of_several(self: Derived, x: Tensor) -> Tensor:
    x, y = x.clone().requires_grad_(), torch.zeros(64, 2, requires_grad=True)
    unused = torch.zeros(3, requires_grad=True)
    a, b = self.net(x), self.net(x + y) * 2
    first, second, none = grad([a.sum(), b], [x, y, unused], [None, torch.ones_like(b)], True, True, allow_unused=True)
    assert none is None
    return loss_of(a, first, second)


def three_times(self: Derived, x: Tensor) -> Tensor:
    u = self.net(x.requires_grad_())
    for _ in range(3):
        u = grad(u.sum(), x, create_graph=True)[0][:, :1]
    return loss_of(u, u)


def of_parameters(self: Derived, x: Tensor) -> Tensor:
    loss = self.net(x).square().mean()
    return loss_of(loss, *grad(loss, list(self.parameters()), create_graph=True))


def constant(self: Derived, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = grad(self.net(x).sum(), x)
    return loss_of(slope * self.net(x))


def in_a_checkpoint(self: Derived, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    u: Any = checkpoint(self.net, x, use_reentrant=False)
    return loss_of(u, *grad(u.sum(), x, create_graph=True))


def of_hidden(self: Derived, x: Tensor) -> Tensor:
    hidden = self.net[:2](x)
    hidden.requires_grad_()  # as it does already
    u = self.net[2:](hidden)
    return loss_of(u, *grad(u.sum(), hidden, create_graph=True))


def of_kept(self: Derived, x: Tensor) -> Tensor:
    shift = torch.zeros(2)
    shift.requires_grad_()
    self.shift = shift
    u = self.net(x + shift)
    return loss_of(u, *grad(u.sum(), shift, create_graph=True))


def of_counted(self: Derived, x: Tensor) -> Tensor:
    kinds = (x.detach()[:, 0] > 0).long()
    x = x.detach().requires_grad_()
    # A size that depends on data.
    energy = torch.zeros(int(kinds.max()) + 1).index_add(0, kinds, self.net(x).squeeze(1))
    return loss_of(energy, *grad(energy.sum(), x, create_graph=True))


def of_selected(self: Derived, x: Tensor) -> Tensor:
    near = x.detach().norm(dim=1) < 1.5
    x = x.detach().requires_grad_()
    u = self.net(x[near])
    return loss_of(u, *grad(u.sum(), x, create_graph=True))


def by_func(self: Derived, x: Tensor) -> Tensor:
    return loss_of(self.net(x), torch.func.grad(lambda p: self.net(p).sum())(x))


def by_hessian(self: Derived, x: Tensor) -> Tensor:
    return loss_of(self.net(x), torch.func.vmap(torch.func.hessian(lambda p: self.net(p).sum()))(x))


def by_product(self: Derived, x: Tensor) -> Tensor:
    slope = torch.func.grad(lambda p: self.net(p).sum())
    return loss_of(self.net(x), *torch.func.jvp(slope, (x,), (torch.ones_like(x),)))


class Growth(torch.autograd.Function):
    """Exponential growth, whose backward reads the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(0.5 * x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return 0.5 * gradient * y


class Halted(Growth):
    """The same, but that its derivative is a constant to autograd."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        with torch.no_grad():
            slope = 0.5 * y
        return gradient * slope


def through(function: Any) -> Callable[[Derived, Tensor], Tensor]:
    def kind(self: Derived, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = function.apply(self.net(x))
        return loss_of(u, *grad(u.sum(), x, create_graph=True))

    return kind


KINDS = {
    kind.__name__: kind
    for kind in (
        *(of_input, of_intermediate, of_hidden, of_kept, of_several, of_parameters, of_counted, of_selected),
        *(three_times, constant, in_a_checkpoint, by_func, by_hessian, by_product),
    )
}
NETS: dict[str, nn.Module] = {
    "dropout": nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Dropout(0.3), nn.Linear(32, 1)),
    "statistics": nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.Softplus(), nn.Linear(32, 1)),
    "norms": nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)),
}


@pytest.mark.parametrize("kind", [*KINDS.values(), through(Growth)], ids=[*KINDS, "custom_function"])
def test_ways_to_take_a_derivative(kind: Callable[[Derived, Tensor], Tensor]) -> None:
    check(Derived(kind), {"x": X})


@pytest.mark.slow
def test_the_first_step_is_within_the_budget_where_sizes_depend_on_data() -> None:
    """A run that found the sizes held what the plain step does."""
    model, x = Derived(of_selected, models.network(2, layers=6)), torch.randn(2000, 2)
    roomy = memopt.plan(copy.deepcopy(model), 1.0, {"x": x.clone()}, **EXACT, elsewhere_gb=0)
    budget = (roomy.smallest_gb() + roomy.plain_peak_gb) / 2
    expected = run(copy.deepcopy(model), lambda model: step(model, {"x": x}), {"x": x})
    trained = run(optimised(model, budget, elsewhere_gb=0), lambda model: step(model, {"x": x}), {"x": x})
    assert_same(trained, expected)
    assert trained.peak_bytes - x.nbytes <= budget * GIB  # the step copies its batch


@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_layers_that_are_differentiated_twice(net: nn.Module) -> None:
    check(Derived(of_input, net), {"x": X}, steps=2)


def test_a_function_whose_derivative_is_constant_is_refused() -> None:
    model = Derived(through(Halted))
    with pytest.raises(memopt.CaptureError, match=r"derivatives through an autograd\.Function.* add 'plain' to allow"):
        step(optimised(model), {"x": X})
    plain = run(copy.deepcopy(model), lambda model: step(model, {"x": X}), {"x": X})
    ours = optimised(model, allow={"recompute", "plain"})
    with pytest.warns(UserWarning, match="trains without a plan"):
        trained = run(ours, lambda model: step(model, {"x": X}), {"x": X})
    assert_same(trained, plain)


def test_code_that_requires_no_grad_where_it_is_compiled_names_the_way() -> None:
    """As the models of mace do."""

    def kind(self: Derived, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            x.requires_grad_()
        u = self.net(x)
        return loss_of(u, *grad(u.sum(), x, create_graph=True))

    with pytest.raises(memopt.CaptureError, match=r"does not require grad.*call requires_grad_\(\) on the input"):
        step(optimised(Derived(kind)), {"x": X})


def test_a_loss_of_the_model_under_another_name() -> None:
    ours = optimised(models.network(2), loss_fn=lambda net, x: net(x).mean())
    with pytest.raises(TypeError, match="name its first parameter `model`"):
        memopt.training_loss(ours, X)


def test_a_refusal_says_that_the_step_has_second_derivatives() -> None:
    with pytest.raises(memopt.BudgetError, match="second derivatives"):
        memopt.plan(POTENTIALS[0](), 1e-6, molecules(), **EXACT)


def test_derivatives_stay_in_fp32() -> None:
    model, batch = SchNet(), molecules()
    plain = run(copy.deepcopy(model), lambda model: step(model, batch), batch)
    ours = optimised(model, precision="bf16", example_inputs=fresh(batch))
    assert "derivatives of derivatives are not taken in torch.bfloat16" in memopt.plan_of(ours).notes[0]
    assert_same(run(ours, lambda model: step(model, batch), batch), plain)


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("burgers", "score matching", "maml", "curvature") else name for name in losses(1)]
)
def test_losses_of_the_model_and_the_batch(name: str) -> None:
    torch.manual_seed(0)
    loss, model, batch = losses(64)[name]
    plain, ours = copy.deepcopy(model), optimised(model, loss_fn=loss)
    spread = (lambda model, batch: loss(model, *batch)) if name == "burgers" else loss
    expected = run(plain, lambda model: step(model, batch, spread), batch)
    assert_same(run(ours, lambda model: step(model, batch, memopt.training_loss), batch), expected)
    assert memopt.status(ours).state is memopt.State.PLANNED
    assert same(ours(torch.ones(2, model[0].in_features)), plain(torch.ones(2, model[0].in_features)))


def test_a_training_step_with_a_loss_of_the_model() -> None:
    loss, model, batch = losses(64)["gradient penalty"]
    ours = optimised(model, loss_fn=loss)
    trained = memopt.TrainStep(ours, torch.optim.SGD(ours.parameters(), 0.1), max_grad_norm=None)
    torch.manual_seed(1)
    found = trained(fresh(batch)).loss
    torch.manual_seed(1)
    assert float(found) == float(loss(model, fresh(batch)).detach())


def test_a_derivative_in_the_loop_names_the_way() -> None:
    ours, x = optimised(models.network(2)), X.clone().requires_grad_()
    with pytest.raises(memopt.UnplannedGradientError, match=r"loss_fn of \(model, batch\)"):
        grad(ours(x).sum(), x, create_graph=True)


def peaks(model: nn.Module, batch: Any, options: dict[str, Any]) -> tuple[int, int, memopt.Plan]:
    """The bytes of a plain step, those of model and batch in it, and the plan of a roomy budget."""
    plain = run(copy.deepcopy(model), lambda model: step(model, batch, options.get("loss_fn")), batch)
    own = distinct_bytes([*model.parameters(), *model.buffers(), *tree_leaves(batch)])
    copies = distinct_bytes(tree_leaves(batch))  # of the step's own copy of the batch
    return plain.peak_bytes - copies, own, memopt.plan(copy.deepcopy(model), 1.0, fresh(batch), **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", POTENTIALS, ids=lambda kind: kind.__name__)
def test_five_budgets(kind: type[nn.Module]) -> None:
    model, batch = kind(32, 3), molecules(200, 3000)
    if kind.__name__ == "DistanceTransformer":
        batch = molecules(150, 10)
    plain_bytes, own, roomy = peaks(model, batch, {})
    smallest = roomy.smallest_gb() * GIB
    assert smallest - own <= 0.5 * (plain_bytes - own)
    expected = run(copy.deepcopy(model), lambda model: step(model, batch), batch)
    copies = distinct_bytes(tree_leaves(batch))
    for part in range(5):
        budget = smallest + part / 4 * (plain_bytes - smallest)
        ours = optimised(model, budget / GIB, example_inputs=fresh(batch))
        trained = run(ours, lambda model: step(model, batch), batch)
        assert_same(trained, expected)
        measured = trained.peak_bytes - copies
        assert measured <= budget
        assert measured <= memopt.plan_of(ours).predicted_peak_gb * GIB <= 1.01 * measured
