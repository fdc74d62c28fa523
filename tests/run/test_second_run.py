"""Forwards that wait for their backward give up what they have saved, and run a second time in it."""

from __future__ import annotations

import gc
import weakref
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.errors import GIB
from memopt.run.session import session_of
from memopt.run.status import State
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
planned = pytest.mark.plans_always
planned_or_plain = pytest.mark.parametrize("state", [pytest.param(State.PLANNED, marks=planned), State.PLAIN])
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


class Siamese(nn.Module):
    """Convolutions with running statistics and random numbers; the step of the last ones holds most."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(8), nn.Dropout2d(p=0.2),
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(8), nn.Dropout2d(p=0.2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, 8),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.cnn(x)


def images(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(32, 1, 24, 24, generator=generator) for _ in range(count)]


def optimised(model: Siamese, budget_gb: float) -> Siamese:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return memopt.optimize(model, budget_gb, optimizer=optimizer, **EXACT)


def trained(model: nn.Module, inputs: list[Tensor], steps: int = 3) -> tuple[list[Tensor], list[int]]:
    """The losses and all values of a model after steps with several forwards before each backward, and their peaks."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(7)
    losses, peaks = [], []
    for _ in range(steps):
        with memopt.measure_peak("cpu") as peak:
            outputs = [model(one) for one in inputs]
            loss = torch.stack([F.mse_loss(one, other) for one in outputs for other in outputs[:1]]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        peaks.append(peak.bytes)
    return [*losses, *(one.detach().clone() for one in (*model.parameters(), *model.buffers()))], peaks


def smallest_gb(inputs: list[Tensor]) -> float:
    """The budget that a first forward is told, of which nobody knows that others follow."""
    model = optimised(Siamese(), 0.001)
    with pytest.raises(memopt.BudgetError) as refusal:
        model(inputs[0])
    memopt.remove(model)
    return float(refusal.value.smallest_gb) * (1 + 1e-6)


@planned
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_the_budget_that_one_forward_needs_will_do_for_several(count: int) -> None:
    inputs = images(count)
    plain, _ = trained(Siamese(), inputs)
    budget = smallest_gb(inputs)
    model = optimised(Siamese(), budget)
    with pytest.warns(UserWarning, match="run a second time"):
        ours, peaks = trained(model, inputs)
    assert all(map(torch.equal, ours, plain))
    assert max(peaks) <= budget * 1024**3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*run a second time")
@pytest.mark.parametrize("count", [2, 3])
def test_a_budget_in_which_one_step_runs_plain_will_do_for_several(count: int) -> None:
    """The first forward runs plain, since nobody knows that others follow, for which it leaves no room."""
    inputs = images(count)
    plain, _ = trained(Siamese(), inputs)
    _, (alone, *_) = trained(Siamese(), inputs[:1])
    budget = 1.2 * alone / GIB
    model = optimised(Siamese(), budget)
    ours, peaks = trained(model, inputs)
    assert all(map(torch.equal, ours, plain))
    assert max(peaks) <= budget * GIB


def waiting(model: Siamese, inputs: list[Tensor], state: State) -> list[Tensor]:
    """The outputs of forwards of which the earlier ones have freed what they saved."""
    session, outputs = session_of(model), list[Tensor]()
    assert session is not None
    for one in inputs:
        assert session.share.free_waiting() == bool(outputs)
        outputs.append(model(one))
        assert session.status.state is state
    return outputs


@planned_or_plain
@pytest.mark.filterwarnings("ignore:.*run a second time")
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_and_statistics_are_those_of_the_plain_model(kept: bool, state: State) -> None:
    plain, model = Siamese(), optimised(Siamese(), 1)
    torch.manual_seed(3)
    expected = torch.stack([plain(one) for one in images(3)]).square().sum()
    torch.manual_seed(3)
    loss = torch.stack(waiting(model, images(3), state)).square().sum()
    drawn = torch.rand(1)
    assert torch.equal(loss, expected)
    for _ in range(1 + kept):
        loss.backward(retain_graph=kept)
        expected.backward(retain_graph=kept)
    pairs = zip((*model.parameters(), *model.buffers()), (*plain.parameters(), *plain.buffers()), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    gradients = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in gradients)
    torch.manual_seed(3)
    [plain(one) for one in images(3)]
    assert torch.equal(torch.rand(1), drawn)


@planned_or_plain
@pytest.mark.filterwarnings("ignore:.*run a second time")
def test_an_input_that_only_the_forward_holds(state: State) -> None:
    """As of `model(batch.to(device))`: the second run takes what the first one has saved of it."""
    gradients = []
    for model in (Siamese(), optimised(Siamese(), 1)):
        torch.manual_seed(3)
        output = model(images(1)[0])
        if session := session_of(model):
            assert session.share.free_waiting()
            assert session.status.state is state
        output.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@planned_or_plain
@pytest.mark.filterwarnings("ignore:.*run a second time")
def test_a_weight_that_changes_before_the_second_run_stops_the_backward(state: State) -> None:
    model = optimised(Siamese(), 1)
    loss = torch.stack(waiting(model, images(2), state)).square().sum()
    with torch.no_grad():
        model.cnn[-1].bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Remembers(Siamese):
    """A model that keeps something of each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.latest = x.mean()
        return super().forward(x)


def test_a_plain_forward_that_a_second_run_would_change_frees_nothing() -> None:
    session = session_of(model := optimised(Remembers(), 1))
    output = model(images(1)[0])
    assert session is not None
    assert session.status.state is State.PLAIN
    assert not session.share.free_waiting()
    output.sum().backward()


SHARED = {"numbers": count(1)}


class Noisy(Siamese):
    """Reads numbers that nobody knows to belong to it, so that a second run gets other ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + next(SHARED["numbers"]))


@pytest.mark.filterwarnings("ignore:.*run a second time")
def test_a_second_run_with_other_values_stops_the_backward() -> None:
    loss = torch.stack(waiting(optimised(Noisy(), 1), images(2), State.PLAIN)).square().sum()
    with pytest.raises(RuntimeError, match="Noisy computes something else when its forward runs a second time"):
        loss.backward()


@planned_or_plain
@pytest.mark.filterwarnings("ignore:.*run a second time")
def test_nothing_of_a_model_stays_after_a_second_run(state: State) -> None:
    model = optimised(Siamese(), 1)
    torch.stack(waiting(model, images(2), state)).square().sum().backward()
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(one() is not None for one in parameters)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        with torch.inference_mode():
            self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() + self.shift


@planned
def test_a_model_with_buffers_made_in_inference_mode_trains() -> None:
    """They have no version by which a write to them would be noticed, and nothing can write to them in training."""
    torch.manual_seed(0)
    model, plain = Shifted(), Shifted()
    plain.layer.load_state_dict(model.layer.state_dict())
    memopt.optimize(model, 1, precision="fp32", allow={"recompute"}, optimizer="sgd")
    rows = torch.randn(4, 8)
    for one in (model, plain):
        one(rows).square().sum().backward()
    assert memopt.status(model).plan is not None
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(own.grad, expected.grad) for own, expected in pairs)


class Policy(nn.Module):
    """A recurrent policy, which a loop calls for each step of an episode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.cell, self.head = nn.Linear(16, 64), nn.GRUCell(64, 64), nn.Linear(64, 4)

    def forward(self, observed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(torch.relu(self.encode(observed)), state)
        return self.head(state), state


@pytest.mark.slow
def test_an_episode_longer_than_all_before_ends_no_training() -> None:
    """Its first steps run plain, as the steps of shorter episodes did, and are freed once there are more."""

    def episodes(budget_gb: float = 0) -> tuple[list[float], list[int]]:
        gc.collect()
        policy = Policy()
        optimizer = torch.optim.SGD(policy.parameters(), 0.1)
        if budget_gb:
            memopt.optimize(policy, budget_gb, optimizer=optimizer, **EXACT)
        losses, peaks = [], []
        for steps in (8, 8, 8, 20):
            with memopt.measure_peak() as peak:
                state, loss = torch.zeros(64, 64), torch.zeros(())
                for _ in range(steps):
                    logits, state = policy(torch.rand(64, 16), state)
                    loss = loss + logits.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                del logits, state, loss
            peaks.append(peak.bytes)
        return losses, peaks

    torch.manual_seed(7)
    losses, plain = episodes()
    torch.manual_seed(7)
    found, peaks = episodes(0.5 * max(plain) / GIB)
    assert found == losses
    assert max(peaks) <= 0.5 * max(plain)
