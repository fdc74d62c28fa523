"""Refusals: one clear sentence that names the value and the change to make, and an unchanged model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from examples.models.families import integers, normals
from memopt.errors import GIB
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import CLASSES, ROWS, WIDTH, Layered
from tests.end_to_end.pieces import Trained, assert_same, call, loss, run, step

pytestmark = pytest.mark.plans_always  # the plain steps would fit

BATCH = (normals(ROWS, WIDTH), integers(CLASSES, ROWS))


def make(kind: type[nn.Module] = Layered) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


def trained(model: nn.Module) -> Trained:
    return run(model, lambda model: step(model, BATCH), BATCH)


def is_one_sentence(text: str) -> bool:
    return "\n" not in text and len(text) < 400 and not re.search(r"[.!?] [A-Z]", text) and not text.endswith(".")


@contextmanager
def refused(model: nn.Module, kind: type[Exception], *words: str, check: bool = True) -> Iterator[list[Exception]]:
    """Assert that the block raises `kind` with a sentence that has all the words in it, and leaves the model alone."""
    plain = copy.deepcopy(model)
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    caught: list[Exception] = []
    with pytest.raises(kind) as info:
        yield caught
    caught.append(info.value)
    text = str(info.value)
    assert is_one_sentence(getattr(info.value, "sentence", text)), text
    assert all(word in text for word in words), text
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    if check:
        assert_same(trained(model), trained(plain))
        model.zero_grad()


# ---- budgets


@pytest.mark.parametrize(
    ("budget", "kind", "words"),
    [
        (0, ValueError, ["positive", "not 0"]),
        (-3.5, ValueError, ["positive", "-3.5"]),
        (float("nan"), ValueError, ["finite", "nan"]),
        (float("inf"), ValueError, ["finite", "inf"]),
        ("12 GB", TypeError, ["number of gigabytes", "'12 GB'"]),
        (None, TypeError, ["number of gigabytes", "None"]),
        (True, TypeError, ["number of gigabytes", "True"]),
        (12 + 1j, TypeError, ["number of gigabytes", "(12+1j)"]),
        (torch.tensor(12.0), TypeError, ["number of gigabytes", "tensor(12.)"]),
    ],
    ids=str,
)
def test_budgets_that_are_none(budget: Any, kind: type[Exception], words: list[str]) -> None:
    model = make()
    with refused(model, kind, "budget_gb", *words):
        memopt.optimize(model, budget, precision="fp32")
    with pytest.raises(kind, match="budget_gb"):
        memopt.plan(model, budget, BATCH, precision="fp32")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["none", "adamw"])
def test_a_budget_below_the_smallest_names_one_that_works(optimizer: Any) -> None:
    model = make()
    with refused(model, memopt.BudgetError, "0.0001 GB", "smallest that works", "dominated by") as caught:
        memopt.optimize(model, 1e-4, example_inputs=BATCH, optimizer=optimizer, precision="fp32")
    error = caught[0]
    assert isinstance(error, memopt.BudgetError)
    assert isinstance(error, ValueError)
    assert error.budget_gb == pytest.approx(1e-4, rel=1e-4)
    rows = re.findall(r"([a-z ]+) ([0-9.]+) (MB|kB)", error.dominated_by)
    assert len(rows) == 3
    unit = {"MB": 1 / 1024, "kB": 1 / 1024**2}
    assert all(name.strip() and 0 < float(size) * unit[prefix] <= error.smallest_gb for name, size, prefix in rows)
    printed = re.search(r"smallest that works is ([0-9.]+) GB", str(error))
    assert printed is not None
    assert error.smallest_gb <= float(printed[1]) < 1.0001 * error.smallest_gb
    with pytest.raises(memopt.BudgetError):
        print(memopt.plan(model, error.smallest_gb * (1 - 1e-6), BATCH, optimizer=optimizer, precision="fp32"))
    assert (
        memopt.plan(model, float(printed[1]), BATCH, optimizer=optimizer, precision="fp32").predicted_peak_gb
        <= error.smallest_gb
    )
    plain = trained(copy.deepcopy(model))
    result = trained(memopt.optimize(model, error.smallest_gb, optimizer=optimizer, precision="fp32"))
    assert_same(result, plain)
    assert result.peak_bytes <= error.smallest_gb * GIB


def test_a_budget_too_small_is_found_at_the_first_training_call() -> None:
    model = make()
    memopt.optimize(model, 1e-4, optimizer=None, precision="fp32")
    with refused(model, memopt.BudgetError, "0.0001 GB", check=False):
        call(model, BATCH)
    with torch.no_grad():
        call(model, BATCH)
    assert_same(trained(memopt.remove(model)), trained(make()))


@pytest.mark.slow
def test_the_steps_of_an_optimizer_are_tried_once_for_all_lever_sets() -> None:
    """With a thousand parameters a trial takes a second."""
    tried: list[int] = []

    class Counted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            tried.append(len(self.param_groups))
            return super().step(closure)

    model = make()
    optimizer = Counted(model.parameters())
    with pytest.raises(memopt.BudgetError) as refusal:
        memopt.optimize(model, 0.0001, example_inputs=BATCH, optimizer=optimizer)
    tried.clear()
    memopt.optimize(model, 1.01 * refusal.value.smallest_gb, example_inputs=BATCH, optimizer=optimizer)
    assert len(tried) == 3  # one trial


@pytest.mark.parametrize("gb", [1.0, 7.5, 0.123456789, 3.21e-5, 123.4567891, 9.9999999e-3])
def test_the_printed_figure_is_never_below_the_one_meant(gb: float) -> None:
    error = memopt.BudgetError(1, int(gb * GIB), "parameters")
    printed = re.search(r"works is ([0-9.]+) GB", str(error))
    assert printed is not None
    assert error.smallest_gb <= float(printed[1]) <= error.smallest_gb * 1.00001


# ---- models


def test_a_model_without_trainable_parameters() -> None:
    model = make().requires_grad_(False)
    with refused(model, ValueError, "Layered has no trainable parameters", "requires_grad=True", check=False):
        memopt.optimize(model, 1.0, precision="fp32")
    with pytest.raises(ValueError, match="Sequential has no trainable parameters"):
        memopt.optimize(nn.Sequential(), 1.0, precision="fp32")


@pytest.mark.parametrize("thing", [None, "gpt2", Layered, lambda x: x])
def test_what_is_not_a_module(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not (NoneType|str|type|function)"):
        memopt.optimize(thing, 1.0, precision="fp32")


def test_a_model_that_cannot_be_captured() -> None:
    model = make(odd_models.Uncapturable)
    words = ("Uncapturable cannot be captured as a graph", "disable", "odd_models.py:", "'plain' to allow")
    with refused(model, memopt.CaptureError, *words):
        memopt.optimize(model, 1.0, example_inputs=BATCH, precision="fp32")
    memopt.optimize(model, 1.0, precision="fp32")
    with refused(model, memopt.CaptureError, *words, check=False):
        call(model, BATCH)
    memopt.optimize(model, 1.0, allow={"recompute", "plain"}, precision="fp32")
    with pytest.warns(UserWarning, match="trains without a plan from now on"):
        assert_same(trained(model), trained(make(odd_models.Uncapturable)))


def test_a_model_that_leaves_for_numpy_is_planned_on_values_alone() -> None:
    model = make(odd_models.NumpyInLoop)
    words = ("NumpyInLoop cannot be captured", "data-dependent", "numpy", "odd_models.py:141, in body")
    with refused(model, memopt.CaptureError, *words):
        memopt.plan(model, 1.0, tuple(tensor.to("meta") for tensor in BATCH), precision="fp32")
    assert memopt.plan(model, 1.0, BATCH, precision="fp32").regions
    memopt.optimize(model, 1.0, example_inputs=BATCH, precision="fp32", allow={"recompute"})
    assert_same(trained(model), trained(make(odd_models.NumpyInLoop)))


class Counting(odd_models.BreakInLoop):
    """A model that counts its calls in Python and breaks into regions."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, None

    def body(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = super().body(x)
        self.last = x.detach()  # type: ignore[assignment]
        return x


@pytest.mark.slow
def test_planning_ahead_leaves_what_the_forward_writes_down() -> None:
    model: Any = make(Counting)
    with refused(model, memopt.BudgetError, check=False):
        memopt.optimize(model, 1e-4, example_inputs=BATCH, optimizer=None, precision="fp32")
    assert (model.calls, model.last) == (0, None)
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32")
    step(model, BATCH)
    assert model.calls == 1
    assert type(model.last) is Tensor


class Unrelated(Layered):
    """A model whose loss depends on no parameter."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return x.square().mean()


def test_a_loss_that_depends_on_no_parameter() -> None:
    model = make(Unrelated)
    with refused(model, memopt.CaptureError, "depends on no trainable parameter", check=False):
        memopt.optimize(model, 1.0, example_inputs=BATCH, precision="fp32")


# ---- inputs


def test_inputs_on_another_device() -> None:
    """Inputs on "meta", the other device that every machine has, can be planned for but not trained on."""
    model = make()
    elsewhere = tuple(value.to("meta") for value in BATCH)
    ahead, here = (memopt.plan(model, 1.0, inputs, precision="fp32") for inputs in (elsewhere, BATCH))
    assert ahead.predicted_peak_gb == here.predicted_peak_gb, f"{ahead}\n{here}"
    memopt.optimize(model, 1.0, example_inputs=elsewhere, precision="fp32")
    words = ("shape (256, 64) is on meta", "model is on cpu", ".to(")
    with refused(model, ValueError, *words, check=False):
        call(model, elsewhere)
    assert_same(trained(model), trained(make()))


def test_a_model_on_meta_is_planned_and_not_trained() -> None:
    model = Layered().to("meta")
    memopt.optimize(model, 1.0, example_inputs=BATCH, precision="fp32")
    with pytest.raises(ValueError, match="is on cpu, but the model is on meta"):
        call(model, BATCH)


def test_parameters_on_several_devices() -> None:
    model: Any = make()
    model.head.to("meta")
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\); move them to one"):
        memopt.optimize(model, 1.0, precision="fp32")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("of", [torch.jit.script, lambda one: torch.jit.trace(one, BATCH[0])], ids=["script", "trace"])
def test_modules_of_torchscript(of: Any) -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = of(nn.Linear(BATCH[0].shape[-1], 4))

    with pytest.raises(ValueError, match=r"Scripted has TorchScript modules \(the first of 1: inner\).*jit_script_fx"):
        memopt.optimize(Scripted(), 1.0)


@pytest.mark.parametrize("inputs", [7, "text", object(), iter(BATCH)], ids=lambda value: type(value).__name__)
def test_example_inputs_of_a_wrong_kind(inputs: Any) -> None:
    model = make()
    with refused(model, TypeError, "example_inputs must be a tuple", type(inputs).__name__, check=False):
        memopt.optimize(model, 1.0, example_inputs=inputs, precision="fp32")


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ({"x": BATCH[0], "targets": BATCH[1]}, "targets"),
        ((BATCH[0],), "labels"),
        ((BATCH[0][:, :10], BATCH[1]), "10"),
    ],
    ids=["unknown keyword", "too few", "wrong shape"],
)
def test_example_inputs_that_the_model_does_not_take(inputs: Any, word: str) -> None:
    model = make()
    with refused(model, memopt.CaptureError, "Layered", word, check=False):
        memopt.optimize(model, 1.0, example_inputs=inputs, precision="fp32")


def test_with_a_loss_fn_a_batch_is_a_pair() -> None:
    model = make(odd_models.Logits)
    with refused(model, TypeError, "must be a pair (inputs, targets)", "a tuple of 1", check=False):
        memopt.optimize(model, 1.0, example_inputs=(BATCH[0],), loss_fn=nn.functional.cross_entropy, precision="fp32")
    with pytest.raises(ValueError, match="optimised with a loss_fn"):
        memopt.training_loss(memopt.optimize(model, 1.0, precision="fp32"), (BATCH[0], BATCH[1]))


# ---- options


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"allow": ["recompute", "magic"]}, ValueError, ["'magic'", "known are", "recompute"]),
        ({"allow": "recompute"}, TypeError, ["set of lever names", "'recompute'"]),
        ({"allow": None}, TypeError, ["set of lever names", "None"]),
        ({"precision": "fp64"}, ValueError, ["precision", "'fp64'", "'auto'"]),
        ({"precision": None}, TypeError, ["precision", "None"]),
        ({"backend": "tpu"}, ValueError, ["backend", "'tpu'", "'auto'"]),
        ({"outputs": "some"}, ValueError, ["outputs", "'some'", "'loss', 'all'"]),
        ({"loss_fn": 3}, TypeError, ["loss_fn", "3"]),
        ({"optimizer": "adamv"}, ValueError, ["'adamv'"]),
        ({"optimizer": 3}, (TypeError, ValueError), ["3"]),
    ],
    ids=str,
)
def test_options_that_are_none(options: dict[str, Any], kind: Any, words: list[str]) -> None:
    model = make()
    with refused(model, kind, *words, check=False):
        memopt.optimize(model, 1.0, **options)


# ---- backwards


SECOND_ORDERS: dict[str, Callable[[nn.Module], Any]] = {
    "backward": lambda model: loss(model, BATCH).backward(create_graph=True),  # type: ignore[no-untyped-call]
    "grad": lambda model: torch.autograd.grad(loss(model, BATCH), list(model.parameters()), create_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("second", SECOND_ORDERS.values(), ids=SECOND_ORDERS)
def test_gradients_of_gradients(second: Callable[[nn.Module], Any]) -> None:
    model = make()
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32")
    with refused(model, ValueError, "create_graph=True", "memopt.remove", check=False):
        second(model)
    assert_same(trained(model), trained(make()))
    memopt.remove(model).zero_grad()
    second(model)


class Force(Layered):
    """Takes the gradient of its loss in the forward, behind a branch on values."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        loss = super().forward(x, labels)
        if loss.item() > 1e6:
            loss = loss * 1e-6
        (found,) = torch.autograd.grad(loss, x, create_graph=True)
        return found.square().mean()


def test_a_derivative_across_a_break() -> None:
    model, words = make(Force), ("derivative through that break", "test_refusals.py:")
    with refused(model, memopt.CaptureError, *words):
        memopt.optimize(model, 1.0, example_inputs=BATCH, precision="fp32")
    memopt.optimize(model, 1.0, precision="fp32")
    with refused(model, memopt.CaptureError, *words, check=False):
        call(model, BATCH)
