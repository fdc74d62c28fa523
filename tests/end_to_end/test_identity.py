"""An optimised model is the same model: to its user, to copies and files, and to the garbage collector."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from examples.models.families import integers, normals
from memopt.run.session import session_of
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import CLASSES, ROWS, WIDTH, Layered
from tests.end_to_end.pieces import assert_same, call, run, step, tight
from tests.marks import slow

pytestmark = pytest.mark.plans_always  # the plain steps would fit


class Noted(Layered):
    """A model with a buffer, tied weights, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.blocks[1][1].weight = self.blocks[0][1].weight
        self.register_buffer("seen", torch.zeros(()))
        self.note, self.calls = "keep me", [1, 2]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.seen += 1
        return self.loss(F.dropout(self.body(x), 0.1), labels)


BATCH = (normals(ROWS, WIDTH), integers(CLASSES, ROWS))


def make(kind: Callable[[], nn.Module] = Noted) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


def trained(model: nn.Module) -> Any:
    return run(model, lambda model: step(model, BATCH), BATCH)


@pytest.fixture(scope="module")
def budget() -> float:
    return tight(make(), BATCH)


@pytest.fixture
def optimized(budget: float) -> nn.Module:
    """Return a model that is optimised and was trained for a step."""
    model = memopt.optimize(make(), budget, optimizer=None, precision="fp32", allow={"recompute"})
    step(model, BATCH)
    model.zero_grad()
    return model


def is_plain(model: nn.Module) -> bool:
    """Whether nothing of memopt is left in a model: it has the attributes that it was made with, and no others."""
    return vars(model).keys() == vars(make(type(model))).keys() and session_of(model) is None


def test_optimize_returns_the_very_model_with_its_class_and_parameters(budget: float) -> None:
    model = make()
    before = (type(model), model.__class__, dict(model.named_parameters()), dict(model.named_modules()))
    keys, text = list(model.state_dict()), repr(model)
    assert memopt.optimize(model, budget, optimizer=None, precision="fp32", allow={"recompute"}) is model
    step(model, BATCH)
    assert isinstance(model, Noted)
    assert type(model) is Noted
    assert before[:2] == (type(model), model.__class__)
    assert all(model.get_parameter(name) is parameter for name, parameter in before[2].items())
    assert all(model.get_submodule(name) is module for name, module in before[3].items())
    assert list(model.state_dict()) == keys
    assert repr(model) == text


def test_attributes_are_as_before(optimized: Any) -> None:
    assert (optimized.note, optimized.calls) == ("keep me", [1, 2])
    optimized.note = "another"
    assert vars(optimized)["note"] == "another"
    assert vars(optimized).keys() - vars(make()).keys() == {"_compiled_call_impl"}  # where `compile()` puts its own


def test_train_and_eval_change_modes_as_before(optimized: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = session_of(optimized)
    assert planned is not None
    ran: list[bool] = []
    monkeypatch.setattr(planned.forward, "plain", lambda *args: ran.append(optimized.training))
    assert optimized.eval() is optimized
    assert not any(module.training for module in optimized.modules())
    call(optimized, BATCH)
    optimized.train()
    assert all(module.training for module in optimized.modules())
    with torch.no_grad():
        call(optimized, BATCH)
    assert ran == [False, True]
    call(optimized, BATCH)
    assert len(ran) == 2


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_plain_models(optimized: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> None:
    other = copied(optimized)
    assert is_plain(other)
    assert type(other) is Noted
    tied: Any = other
    assert tied.blocks[1][1].weight is tied.blocks[0][1].weight
    assert_same(trained(other), trained(optimized))


def test_the_state_goes_into_a_plain_model_and_back(optimized: nn.Module) -> None:
    other = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    state = other.state_dict()
    optimized.load_state_dict(state)
    expected = trained(other)
    assert_same(trained(optimized), expected)
    other.load_state_dict(optimized.state_dict())
    assert all(torch.equal(other.state_dict()[key], value) for key, value in optimized.state_dict().items())


def test_remove_leaves_no_trace(budget: float) -> None:
    model, other = make(), make()
    before = {name: (value, copy.copy(value)) for name, value in vars(model).items()}
    memopt.optimize(model, budget, optimizer=None, precision="fp32", allow={"recompute"})
    trained(model)
    trained(other)
    assert memopt.remove(model) is model
    assert vars(model).keys() == before.keys()
    for name, (value, kept) in before.items():
        assert vars(model)[name] is value or vars(model)[name] == value
        if isinstance(value, dict):
            assert value.keys() == kept.keys()
    for module in model.modules():
        assert "_compiled_call_impl" not in vars(module)
    assert_same(trained(model), trained(other))
    assert memopt.remove(model) is model
    with pytest.raises(ValueError, match="not optimised"):
        memopt.plan_of(model)


def test_optimising_twice_replaces_the_first(budget: float) -> None:
    model = memopt.optimize(make(), 1.0, optimizer=None, precision="fp32", allow={"recompute"})
    step(model, BATCH)
    first = memopt.plan_of(model)
    memopt.optimize(model, budget, optimizer=None, precision="fp32", allow={"recompute"})
    model.zero_grad()
    step(model, BATCH)
    assert memopt.plan_of(model).budget_bytes < first.budget_bytes
    assert is_plain(memopt.remove(model))


def test_a_failed_second_optimize_leaves_the_first(optimized: nn.Module, budget: float) -> None:
    first = memopt.plan_of(optimized)
    with pytest.raises(memopt.BudgetError):
        memopt.optimize(
            optimized, budget / 100, example_inputs=BATCH, optimizer=None, precision="fp32", allow={"recompute"}
        )
    assert memopt.plan_of(optimized) is first


def test_a_model_that_was_compiled_stays_compiled_beneath(budget: float) -> None:
    compiled: list[int] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        compiled.append(len(inputs))
        return graph_module.forward

    model: Any = make()
    model.compile(backend=backend)
    own = model._compiled_call_impl
    memopt.optimize(model, budget, optimizer=None, precision="fp32", allow={"recompute"})
    step(model, BATCH)
    assert not compiled, "a training call runs as planned, not as compiled before"
    memopt.optimize(model, 2 * budget, optimizer=None, precision="fp32", allow={"recompute"})
    with torch.no_grad():
        call(model, BATCH)
    assert len(compiled) == 1, "other calls run as before"
    assert memopt.remove(model)._compiled_call_impl is own
    model.zero_grad()
    step(model, BATCH)
    assert len(compiled) == 2


@pytest.mark.parametrize("kind", [Noted, odd_models.GraphBreak, odd_models.BreakInLoop])
def test_a_deleted_model_dies(kind: Callable[[], nn.Module]) -> None:
    model = make(kind)
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"})
    step(model, BATCH)
    step(model, BATCH)
    alive = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
    del model
    gc.collect()
    assert not any(reference() is not None for reference in alive)


class KeepsOutputs(Noted):
    """As models do that have their last attention or hidden states as an attribute, with their autograd graph."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.latest = super().forward(*args, **kwargs)
        return self.latest


@pytest.mark.parametrize("plans", [False, True], ids=["plain", "planned"])
def test_a_deleted_model_dies_that_keeps_an_output(plans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not plans:
        monkeypatch.delenv("MEMOPT_PLAN")
    model = make(KeepsOutputs)
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"})
    step(model, BATCH)
    step(model, BATCH)
    assert memopt.status(model).state is (memopt.State.PLANNED if plans else memopt.State.PLAIN)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def hooked(kept: dict[int, torch.Tensor]) -> nn.Module:
    """A trained model with hooks that keep outputs within it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    for number in (0, 2):
        model[number].register_forward_hook(lambda _, __, output, at=number: kept.update({at: output}))
    memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"})
    for _ in range(2):
        loss = model(torch.rand(4, 8)).sum() + sum(value.abs().sum() for value in kept.values())
        loss.backward()
    return model


def test_a_deleted_model_dies_whose_hooks_keep_outputs_within_it() -> None:
    alive = weakref.ref(hooked({}))
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("kind", "removed"), [(Noted, True), slow(Noted, False), slow(odd_models.BreakInLoop, False)], ids=str
)
def test_many_models_leave_nothing_with_dynamo(kind: type[nn.Module], removed: bool) -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, cached_backends

    def train_one() -> tuple[int, int, int]:
        model = memopt.optimize(make(kind), 1.0, optimizer=None, precision="fp32", allow={"recompute"})
        step(model, BATCH)
        if removed:
            memopt.remove(model)
        del model
        gc.collect()
        names = sum(name.startswith(("__compiled_fn", "__resume_at")) for name in vars(memopt.capture.dynamo))
        codes = [kind.forward.__code__, *(getattr(kind, name).__code__ for name in ("body", "loss"))]
        codes.append(odd_models.Block.forward.__code__)
        return len(cached_backends), names, sum(len(_debug_get_cache_entry_list(code)) for code in codes)

    first = train_one()
    assert [train_one() for _ in range(2)] == [first] * 2
