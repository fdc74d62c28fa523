"""Parameters stepped inside the planned backward: the numbers of the plain model, less memory, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import memopt
from examples.models.families import BY_NAME, Batch, Family, library, loss_of, normals
from memopt import BudgetError
from memopt.account.account import distinct_bytes
from memopt.capture.inputs import tensors_in
from memopt.emit import emit
from memopt.errors import GIB
from memopt.meter import measure_peak
from memopt.optimizers import OptimizerInBackward
from memopt.planning.stages import Priced
from memopt.run.session import session_of
from tests import smallest
from tests.end_to_end.odd_models import GraphBreak
from tests.end_to_end.usual import batch as odd_batch
from tests.end_to_end.usual import make as odd_make
from tests.marks import slow
from tests.optimizers.pieces import Choice, same, small_gpt2, text, values
from tests.train.pieces import GPT2

NAME = "optimizer_in_backward"
EXACT = {"recompute", NAME}


def train(model: nn.Module, optimizer: optim.Optimizer, batch: Batch, steps: int = 3) -> list[float]:
    """Return the losses; dropout draws the same numbers in every run."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
        del loss
    return found


def pull(model: nn.Module, names: Collection[str] = (NAME,), optimizer: Any = optim.AdamW, **options: Any) -> nn.Module:
    """Have plans use these proposals, whatever the budget."""
    options = {"precision": "fp32", "allow": {"recompute"}, **options}
    memopt.optimize(model, options.pop("budget_gb", 4), optimizer=optimizer, **options)
    planned = session_of(model)
    assert planned is not None
    planned.forward.planner.optimizer_choice.decide(names)
    return model


def stepping_in_backward(
    make: Callable[[], nn.Module] = small_gpt2, **options: Any
) -> tuple[nn.Module, optim.Optimizer]:
    model = pull(make(), **options)
    return model, memopt.wrap_optimizer(model, optim.AdamW(model.parameters(), 1e-2))


def stepped_inside(model: nn.Module) -> int:
    return sum(len(region.steps) for region in memopt.plan_of(model).regions)


gpt2 = library("GPT2", "GPT2LMHeadModel", "ForCausalLM", **{**GPT2, "n_embd": 128})
SMALL = Family("small", gpt2, lambda scale: text(length=32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [SMALL, *(BY_NAME[name] for name in ("gpt2-sdpa", "resnet", "t5"))],
    ids=str,
)
def test_within_the_smallest_budget_bit_by_bit(family: Family) -> None:
    """Tied embeddings, batch statistics, dropout and much recomputation; measured, the peak is within."""
    make, batch = family.make, family.batch("usual")
    error = smallest.refusal(make(), batch, precision="fp32", allow=EXACT)
    assert error.smallest_with[(NAME,)] == error.smallest_bytes < 0.9 * error.smallest_with[()]
    plain = make()
    expected = train(plain, OptimizerInBackward(optim.AdamW(plain.parameters(), 1e-3)), batch)
    model, budget = make(), 1.001 * error.smallest_gb
    memopt.optimize(model, budget, example_inputs=batch, precision="fp32", allow=EXACT)
    plan = memopt.plan_of(model)
    assert plan.proposals == (NAME,)
    assert plan.added_time > 0
    optimizer = memopt.wrap_optimizer(model, optim.AdamW(model.parameters(), 1e-3))
    held = distinct_bytes([*model.parameters(), *model.buffers(), *tensors_in(((), batch))])
    with measure_peak("cpu") as peak:
        assert train(model, optimizer, batch) == expected
    assert peak.allocated_bytes + held <= budget * GIB
    assert same(values(model.parameters()), values(plain.parameters()))
    assert stepped_inside(model) == len(list(model.parameters()))


def peak_of_steps(model: nn.Module, optimizer: optim.Optimizer, batch: Batch) -> int:
    train(model, optimizer, batch, 1)
    with measure_peak("cpu") as peak:
        train(model, optimizer, batch, 1)
    return peak.allocated_bytes


def narrow_layers() -> nn.Module:
    """A model with weights of 8 MB and hardly any activations."""
    torch.manual_seed(0)
    return Layers(512, 8, nn.Linear)


@pytest.mark.plans_always
def test_the_peak_is_lower_than_without() -> None:
    """The peak falls by all gradients but the largest, since nothing else is held beside them."""
    batch = {"x": normals(4, 512)}
    plain = pull(narrow_layers(), (), optim.SGD)
    before = peak_of_steps(plain, optim.SGD(plain.parameters(), 0.1), batch)
    model = pull(narrow_layers(), optimizer=optim.SGD)
    after = peak_of_steps(model, memopt.wrap_optimizer(model, optim.SGD(model.parameters(), 0.1)), batch)
    assert before > distinct_bytes(model.parameters())
    assert after < 0.4 * before
    predicted = [memopt.plan_of(trained).predicted_peak_bytes for trained in (plain, model)]
    assert predicted[0] - predicted[1] == pytest.approx(before - after, rel=0.01)


def test_the_account_is_that_of_the_step() -> None:
    model, batch = pull(narrow_layers()), {"x": normals(4, 512)}
    optimizer = memopt.wrap_optimizer(model, optim.AdamW(model.parameters(), 1e-3))
    found = memopt.check(model, optimizer, batch)
    assert found.row("gradients").measured_bytes == found.row("gradients").predicted_bytes == 0
    measured = found.total.measured_bytes
    assert measured <= found.total.predicted_bytes <= 1.02 * measured


class Backwards(torch.autograd.Function):
    """A product whose backward reads the weight after its gradient was computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = gradient.t() @ x
        return gradient @ weight, of_weight


class Product(nn.Module):
    def __init__(self, width: int, _: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        product: Any = Backwards.apply
        return product(x, self.weight)


class Layers(nn.Module):
    def __init__(self, width: int, depth: int, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def linears() -> nn.Module:
    """A model that is planned in less than a second, for what does not depend on tied weights."""
    torch.manual_seed(0)
    return Layers(16, 3, nn.Linear)


def rows(seed: int = 0) -> Batch:
    return {"x": normals(8, 16, seed=seed)}


def products() -> nn.Module:
    torch.manual_seed(0)
    return Layers(16, 3, Product)


def trained_products(monkeypatch: pytest.MonkeyPatch | None = None) -> list[Tensor]:
    model, optimizer = stepping_in_backward(products)
    if monkeypatch is not None:
        monkeypatch.setattr(emit, "nodes_before_steps", lambda *_: {0: set(), 1: set(), 2: set()})
    train(model, optimizer, {"x": normals(8, 16)})
    assert stepped_inside(model) == 3
    return values(model.parameters())


def test_not_before_the_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is stepped right after its gradient is stepped too early: the layers below get another gradient."""
    plain = products()
    train(plain, OptimizerInBackward(optim.AdamW(plain.parameters(), 1e-2)), {"x": normals(8, 16)})
    expected = values(plain.parameters())
    assert same(trained_products(), expected)
    early = trained_products(monkeypatch)
    assert not any(map(torch.equal, early[:2], expected[:2]))


@pytest.mark.slow
def test_in_8_bits_the_numbers_are_those_of_stepping_afterwards() -> None:
    batch = text(length=32)

    def run(in_backward: bool) -> list[Tensor]:
        model = small_gpt2()
        levers = Choice(low_bit_optimizer=True, optimizer_in_backward=in_backward)
        optimizer = levers.apply(model, optim.AdamW(model.parameters(), 1e-2))
        pull(model, levers.names, precision="bf16")
        train(model, optimizer, batch)
        assert stepped_inside(model) == (28 if in_backward else 0)
        return values(model.parameters())

    assert same(run(True), run(False))


@pytest.mark.slow
def test_it_is_taken_together_with_others() -> None:
    batch, allow = text(length=32), {"recompute", NAME, "bf16_parameters"}
    options: dict[str, Any] = {"precision": "bf16", "allow": allow, "example_inputs": batch}
    error = smallest.refusal(small_gpt2(), batch, precision="bf16", allow=allow)
    everything = ("bf16_parameters", NAME)
    assert error.smallest_with[everything] < min(error.smallest_with[names,] for names in everything)
    model = small_gpt2()
    memopt.optimize(model, 1.001 * error.smallest_with[everything] / GIB, **options)
    assert memopt.plan_of(model).proposals == everything
    optimizer = memopt.wrap_optimizer(model, optim.AdamW(model.parameters(), 1e-2))
    losses = train(model, optimizer, batch, 4)
    assert losses[-1] < losses[0]


def test_frozen_parameters_and_one_with_a_hook() -> None:
    def prepared() -> nn.Module:
        model = small_gpt2()
        model.get_parameter("transformer.wpe.weight").requires_grad_(False)
        hooked = model.get_parameter("transformer.h.0.mlp.c_fc.weight")
        hooked.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
        return model

    plain = prepared()
    expected = train(plain, OptimizerInBackward(optim.AdamW(plain.parameters(), 1e-2)), text())
    model, optimizer = stepping_in_backward(prepared)
    assert train(model, optimizer, text()) == expected
    assert same(values(model.parameters()), values(plain.parameters()))
    assert stepped_inside(model) == 26


@pytest.mark.parametrize(
    ("make", "batch", "name"), [(linears, rows(), "layers.1.weight"), slow(small_gpt2, text(), "lm_head.weight")]
)
def test_a_hook_that_comes_late(make: Callable[[], nn.Module], batch: Batch, name: str) -> None:
    model, optimizer = stepping_in_backward(make)
    plain = make()
    late = OptimizerInBackward(optim.AdamW(plain.parameters(), 1e-2))
    for trained, stepping in ((model, optimizer), (plain, late)):
        loss = loss_of(trained(**batch))
        trained.get_parameter(name).register_hook(lambda gradient: -gradient)  # type: ignore[no-untyped-call]
        loss.backward()
        stepping.step()
    assert same(values(model.parameters()), values(plain.parameters()))


def test_autograd_grad_steps_nothing() -> None:
    model, _ = stepping_in_backward(linears)
    plain, before = linears(), values(model.parameters())
    found = torch.autograd.grad(loss_of(model(**rows())), list(model.parameters()))
    expected = torch.autograd.grad(loss_of(plain(**rows())), list(plain.parameters()))
    assert same(found, expected)
    assert same(values(model.parameters()), before)


def test_backward_into_some_parameters_steps_these() -> None:
    model, optimizer = stepping_in_backward(linears)
    plain = linears()
    late = OptimizerInBackward(optim.AdamW(plain.parameters(), 1e-2))
    for trained, stepping in ((model, optimizer), (plain, late)):
        some = [trained.get_parameter("layers.1.weight")]
        loss_of(trained(**rows())).backward(inputs=some)
        stepping.step()
    assert same(values(model.parameters()), values(plain.parameters()))


@pytest.mark.plans_always
@pytest.mark.parametrize(("make", "batches"), [(linears, (rows(), rows(2))), slow(small_gpt2, (text(), text(seed=2)))])
def test_two_forwards_of_one_backward(make: Callable[[], nn.Module], batches: tuple[Batch, Batch]) -> None:
    """The gradients of a parameter are summed before it is stepped, those of GPT-2's tied weights too."""
    model, optimizer = stepping_in_backward(make)
    plain = pull(make(), ())
    late = OptimizerInBackward(optim.AdamW(plain.parameters(), 1e-2))
    for trained, stepping in ((model, optimizer), (plain, late)):
        (loss_of(trained(**batches[0])) + loss_of(trained(**batches[1]))).backward()
        stepping.step()
    assert same(values(model.parameters()), values(plain.parameters()))


def test_a_graph_is_not_gone_through_twice() -> None:
    model, optimizer = stepping_in_backward(linears)
    loss = loss_of(model(**rows()))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loss_that_reads_parameters_by_itself() -> None:
    model, _ = stepping_in_backward(linears)
    penalty = sum(parameter.sum() for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"a second gradient .* read them in the model's forward"):
        (loss_of(model(**rows())) + penalty).backward()


def test_an_optimizer_that_is_not_wrapped() -> None:
    model = pull(linears())
    optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"6 of 6 parameters, the first of shape \(16, 16\), are not stepped in"):
        model(**rows())
    optimizer = memopt.wrap_optimizer(model, optim.AdamW(model.parameters(), 1e-2))
    assert isinstance(optimizer, OptimizerInBackward)
    train(model, optimizer, rows(), 1)
    optimizer.detach()
    with pytest.raises(ValueError, match="6 of 6 parameters"):
        model(**rows())


def test_held_gradients_are_refused() -> None:
    model, _ = stepping_in_backward(linears)
    weight = model.get_parameter("layers.1.weight")
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(ValueError, match=r"parameters hold gradients already.*call optimizer\.zero_grad\(\) first"):
        model(**rows())


def test_train_step_is_refused() -> None:
    model, _ = stepping_in_backward(linears)
    with pytest.raises(ValueError, match=r"counts on optimizer_in_backward, and TrainStep looks at all gradients"):
        memopt.TrainStep(model, optim.AdamW(model.parameters()))


def test_a_forward_that_breaks() -> None:
    """Autograd steps a parameter once every region that reads it has given its gradient."""
    x, labels = odd_batch()
    batch = {"x": x, "labels": labels}
    plain = odd_make(GraphBreak)
    expected = train(plain, OptimizerInBackward(optim.AdamW(plain.parameters(), 1e-2)), batch)
    model, optimizer = stepping_in_backward(lambda: odd_make(GraphBreak))
    assert train(model, optimizer, batch) == expected
    assert same(values(model.parameters()), values(plain.parameters()))
    assert len(memopt.plan_of(model).regions) > 1
    assert stepped_inside(model) == 0


class Alias(nn.Module):
    """A module that also reads its weight through a tensor that is not a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.alias = self.linear.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) @ self.alias).sum()


class AliasInBuffer(Alias):
    def __init__(self) -> None:
        super().__init__()
        alias = self.alias
        del self.alias
        self.register_buffer("alias", alias)


def test_memory_under_another_name() -> None:
    """For a buffer the parameter is stepped at the end; other tensors that share memory are refused."""
    batch = {"x": normals(4, 8)}
    model, optimizer = stepping_in_backward(AliasInBuffer)
    plain = AliasInBuffer()
    plain.load_state_dict(model.state_dict())
    plain.alias = plain.linear.weight.detach()
    train(model, optimizer, batch, 2)
    assert stepped_inside(model) == 1
    train_after(plain, batch, 2)
    assert same(values(model.parameters()), values(plain.parameters()))
    model, _ = stepping_in_backward(Alias)
    with pytest.raises(ValueError, match=r"shape \(8, 8\) shares its memory with another tensor"):
        model(**batch)


def train_after(model: nn.Module, batch: Batch, steps: int) -> None:
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_where_it_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="before all gradients are known to be finite"):
        memopt.plan(linears(), 1, rows(), precision="fp16", allow=EXACT)
    with pytest.raises(BudgetError, match=r"not considered: code that inductor compiles .* backend='aten'"):
        memopt.optimize(linears(), 1e-6, example_inputs=rows(), precision="fp32", allow=EXACT, backend="inductor")


@pytest.mark.slow
def test_a_second_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Kept plans are used at the second start, and step as before."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    batch = text(length=32)
    least = smallest.smallest_gb(small_gpt2(), batch, precision="fp32", allow=EXACT)
    budget = 1.001 * least
    found = []
    for start in range(2):
        model = small_gpt2()
        memopt.optimize(model, budget, example_inputs=batch, precision="fp32", allow=EXACT)
        plan = memopt.plan_of(model)
        assert plan.proposals == (NAME,)
        assert plan.smallest_gb() == pytest.approx(least, rel=1e-3)
        optimizer = memopt.wrap_optimizer(model, optim.AdamW(model.parameters(), 1e-2))
        if start:
            monkeypatch.setattr(Priced, "solve", None)  # nothing is planned
        found.append((train(model, optimizer, batch), values(model.parameters()), memopt.plan_of(model).regions))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]
    assert found[0][2][0].steps


def test_a_plan_is_saved_with_its_steps(tmp_path: Any) -> None:
    model, optimizer = stepping_in_backward(linears)
    train(model, optimizer, rows(), 1)
    plan = memopt.plan_of(model)
    plan.save(tmp_path / "plan.json")
    assert memopt.Plan.load(tmp_path / "plan.json").regions == plan.regions
    assert plan.at(1.5 * plan.predicted_peak_gb).regions[0].steps == plan.regions[0].steps
    assert plan.frontier(3).smallest_gb == pytest.approx(plan.smallest_gb())
