"""An allocation that fails inside a planned step: in the forward or in the backward, once or every time."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import memopt
from memopt.run.session import session_of
from memopt.run.status import State
from memopt.training_state import CallState
from tests.marks import slow
from tests.shortened import SHORT

pytestmark = pytest.mark.plans_always  # the plain steps would fit

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}
to_fail: Counter[str] = Counter()
"""How often an allocation is still to fail, by the half of the step."""
ran: Counter[str] = Counter()


def allocate(half: str) -> None:
    """Stand for an operator whose allocation fails."""
    ran[half] += 1
    if to_fail[half] > 0:
        to_fail[half] -= 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@torch.library.custom_op("memopt_tests::hungry", mutates_args=())
def hungry(x: Tensor) -> Tensor:
    allocate("forward")
    return x.clone()


@torch.library.custom_op("memopt_tests::hungry_backward", mutates_args=())
def hungry_backward(gradient: Tensor) -> Tensor:
    allocate("backward")
    return gradient.clone()


hungry.register_fake(torch.empty_like)
hungry_backward.register_fake(torch.empty_like)
hungry.register_autograd(lambda ctx, gradient: hungry_backward(gradient))


class Hungry(nn.Module):
    """A module whose result, and its gradient, pass through operators that may find no memory."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return hungry(self.inner(*args, **kwargs))


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small GPT-2 with dropout."""
    torch.manual_seed(0)
    family = SHORT["gpt2-sdpa"]
    model: Any = family.make().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    model.transformer.ln_f = Hungry(model.transformer.ln_f)
    return model, family.batch("usual")


class Convolutions(nn.Module):
    """Convolutions with batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers = [[nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)] for _ in range(4)]
        self.layers = nn.Sequential(*(one for some in layers for one in some))
        self.layers[6] = Hungry(self.layers[6])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(2).mean()


def convolutions() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Convolutions().train(), (torch.randn(8, 8, 24, 24),)


class Remembering(Convolutions):
    """Convolutions that count their calls in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) * self.calls.sum()


def remembering() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Remembering().train(), (torch.randn(8, 8, 24, 24),)


MODELS = {"gpt2": gpt2, "convolutions": convolutions, "remembering": remembering}


@pytest.fixture(autouse=True)
def nothing_fails() -> Iterator[None]:
    to_fail.clear()
    yield
    to_fail.clear()


def trained(
    make: Callable[[], Any], failing: dict[int, tuple[str, int]], accumulate: int = 1
) -> tuple[dict[str, Tensor], list[float], nn.Module, list[int]]:
    """The state after six calls of a planned model's TrainStep, its losses, the model, and the peaks of its plans;
    allocations fail in the calls that `failing` names."""
    model, batch = make()
    plan = memopt.plan(copy.deepcopy(model), 1, batch, **EXACT)
    budget_gb = 0.5 * plan.smallest_gb() + 0.5 * plan.plain_peak_gb
    memopt.optimize(model, budget_gb, **EXACT)
    step = memopt.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2), accumulate=accumulate)
    torch.manual_seed(5)
    losses, peaks = [], []
    for number in range(6):
        if number in failing:
            half, times = failing[number]
            to_fail[half] = times
        losses.append(float(step(batch).loss))
        peaks.append(memopt.plan_of(model).planned.peak_bytes)
    random = {"random": torch.get_rng_state()}
    return {**{name: value.clone() for name, value in model.state_dict().items()}, **random}, losses, model, peaks


QUICK = ("remembering", "forward")
CASES = [(name, half) for name in MODELS for half in ("forward", "backward")]


@pytest.mark.parametrize(("name", "half"), [case if case == QUICK else slow(*case) for case in CASES])
def test_a_step_goes_on_as_if_nothing_had_happened_and_is_planned_tighter(name: str, half: str) -> None:
    undisturbed, losses, *_ = trained(MODELS[name], {})
    state, found, model, peaks = trained(MODELS[name], {2: (half, 1)})
    assert found == losses
    assert all(torch.equal(value, undisturbed[name]) for name, value in state.items())
    assert peaks[2] - memopt.plan_of(model).account.unforeseen < peaks[1]
    account = memopt.plan_of(model).account
    assert account.unforeseen > 0
    assert peaks[-1] <= memopt.plan_of(model).budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_step_that_fails_again_is_refused_with_its_account(half: str) -> None:
    model, batch = gpt2()
    memopt.optimize(model, 1, **EXACT)
    optimizer = torch.optim.AdamW(model.parameters())
    step = memopt.TrainStep(model, optimizer)
    step(batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, state = torch.get_rng_state(), copy.deepcopy(optimizer.state_dict())
    to_fail[half], ran[half] = 100, 0
    with pytest.raises(memopt.StepMemoryError, match=f"failed in the {half} of GPT2LMHeadModel.*parameters") as raised:
        step(batch)
    assert ran[half] == 2, "the step, and once more by a tighter plan"
    assert isinstance(raised.value, torch.OutOfMemoryError)
    assert raised.value.undone
    assert raised.value.repeated
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    now = optimizer.state_dict()
    assert str(now["param_groups"]) == str(state["param_groups"])
    to_fail.clear()
    assert not step(batch).skipped


def test_a_backward_of_ones_own_loop_leaves_all_as_it_was() -> None:
    model, batch = convolutions()
    memopt.optimize(model, 1, **EXACT)
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    to_fail["backward"] = 1
    with pytest.raises(memopt.StepMemoryError, match="later steps are planned with"):
        model(*batch).backward()
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model(*batch).backward()
    assert memopt.plan_of(model).account.unforeseen > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_gradients_of_earlier_calls_that_were_added_to_are_dropped_and_it_is_said() -> None:
    model, batch = gpt2()
    memopt.optimize(model, 1, **EXACT)
    step = memopt.TrainStep(model, torch.optim.AdamW(model.parameters()), accumulate=2)
    step(batch)
    to_fail["backward"] = 1
    with pytest.raises(memopt.StepMemoryError) as raised:
        step(batch)
    assert not raised.value.undone
    assert all(parameter.grad is None for parameter in model.parameters())
    assert step.effective_batch.calls == 0


def test_a_step_of_microbatches_from_an_iterator_is_repeated() -> None:
    model, batch = convolutions()
    memopt.optimize(model, 1, **EXACT)
    step = memopt.TrainStep(model, torch.optim.AdamW(model.parameters()))
    step(batch)
    to_fail["backward"] = 1
    assert step(iter([batch, batch])).stepped


class Counting(Convolutions):
    """Convolutions that count their calls in an input."""

    def forward(self, x: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1)
        return super().forward(x) * calls.sum()


def test_a_step_that_wrote_to_its_inputs_is_not_repeated() -> None:
    torch.manual_seed(0)
    model, x = Counting().train(), torch.randn(8, 8, 24, 24)
    memopt.optimize(model, 1, **EXACT)
    step = memopt.TrainStep(model, torch.optim.AdamW(model.parameters()))
    step((x, torch.zeros(3)))
    to_fail["backward"], calls = 1, torch.zeros(3)
    with pytest.raises(memopt.StepMemoryError, match="inputs were written to") as raised:
        step((x, calls))
    assert not raised.value.undone
    assert not raised.value.repeated
    assert (calls == 1).all()
    assert not step((x, torch.zeros(3))).skipped


def trained_plain(
    make: Callable[[], Any], failing: dict[int, str]
) -> tuple[list[float], dict[str, Tensor], nn.Module, list[State]]:
    """The losses of a model whose plain step fits, by TrainStep, its last state dict, and its states after each step;
    allocations fail in the calls that `failing` names."""
    model, batch = make()
    memopt.optimize(model, 1, **EXACT)
    session = session_of(model)
    assert session is not None
    session.forward.plain_calls.allowed = True
    step = memopt.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(5)
    losses, states = [], []
    for number in range(5):
        if number in failing:
            to_fail[failing[number]] = 1
        losses.append(float(step(batch).loss))
        states.append(memopt.status(model).state)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, model, states


@pytest.mark.parametrize(
    ("name", "half"),
    [slow("gpt2", "forward"), slow("gpt2", "backward"), ("convolutions", "forward"), ("convolutions", "backward")],
)
def test_a_plain_step_in_which_an_allocation_fails_is_planned_tighter(name: str, half: str) -> None:
    undisturbed, expected, _, states = trained_plain(MODELS[name], {})
    assert set(states) == {State.PLAIN}
    found, now, model, states = trained_plain(MODELS[name], {2: half})
    assert found == undisturbed
    assert all(torch.equal(now[name], value) for name, value in expected.items())
    assert states == [State.PLAIN] * 2 + [State.PLANNED] * 3
    assert memopt.plan_of(model).account.unforeseen > 0


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts of tokens."""

    def __len__(self) -> int:
        return 24

    def batch(self, rows: int) -> dict[str, Tensor]:
        return {name: torch.stack([self[number][name] for number in range(rows)]) for name in ("input_ids", "labels")}

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = torch.randint(5, 200, (48,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def by_trainer(folder: Path, failing: bool) -> tuple[dict[str, Tensor], nn.Module]:
    """The parameters of a planned GPT-2 after transformers' Trainer has trained it with AdamW; an allocation fails in
    the third forward where `failing`."""
    model, _ = gpt2()
    plan = memopt.plan(copy.deepcopy(model), 1, Rows().batch(4), **EXACT)
    memopt.optimize(model, 0.5 * (plan.smallest_gb() + plan.plain_peak_gb), **EXACT)

    class Failing(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            to_fail["forward"] = int(failing and state.global_step == 2)

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=5, per_device_train_batch_size=4, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", optim="adamw_torch", seed=1,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[Failing()]).train()
    return {name: value.clone() for name, value in model.state_dict().items()}, model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_the_trainer_of_transformers_goes_on_by_a_tighter_plan(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    undisturbed, _ = by_trainer(tmp_path, failing=False)
    found, model = by_trainer(tmp_path, failing=True)
    assert memopt.plan_of(model).account.unforeseen > 0
    assert all(torch.equal(value, undisturbed[name]) for name, value in found.items())


def test_what_a_module_replaces_is_not_kept_until_the_backward() -> None:
    """The state of a call that may be undone held the tensor, and the large one that it is a view of."""
    model = Remembering().train()
    large = torch.zeros(3, 2**20)
    model.calls = large[:, 0]
    alive = weakref.ref(large)
    state = CallState.of(model, ())
    model.calls = torch.zeros(3)
    del large
    assert alive() is None
    assert state.undo()


def test_what_undoes_a_call_is_gone_after_its_backward() -> None:
    """The copies of a batch normalisation's statistics stayed while the caller kept an output of the step before."""
    model, batch = convolutions()
    memopt.optimize(model, 1, **EXACT)
    loss = model(*batch)
    states = [state for state in CallState._alive if state.model() is model]
    assert len(states) == 1
    alive = weakref.ref(states.pop())
    loss.backward()
    assert alive() is None
    assert loss.isfinite()
