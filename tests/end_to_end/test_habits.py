"""What loops do around a model, each plain and planned: arguments and attributes that change, hooks, modules replaced
in the middle of a training, weights changed between passes, derivatives, threads. All numbers are the plain model's."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations, prune

import memopt

pytestmark = [pytest.mark.plans_always, pytest.mark.slow]
EXACT: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": {"recompute", "reinplace"}}
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Two layers with what loops change: an argument, an attribute, a count, dropout and statistics."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.1)
        self.breaks, self.shift, self.calls = breaks, 0.1, 0

    def forward(self, x: Tensor, scale: Any = 1.0, kind: Any = None) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.norm(self.first(x))) * scale + self.shift
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(self.drop(hidden))


Habit = Callable[[nn.Module], Any]
HABITS: list[Habit] = []


def habit(function: Habit) -> Habit:
    HABITS.append(function)
    return function


def train(model: nn.Module, step: Callable[[int], Tensor], steps: int = 3) -> list[Any]:
    """The losses of some steps, and what they leave behind."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for number in range(steps):
        optimizer.zero_grad()
        loss = step(number).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [losses, left(model), torch.rand(2)]


def left(model: nn.Module) -> list[Any]:
    return [*(one.grad for one in model.parameters()), *(one.clone() for one in model.buffers())]


@habit
def a_float_changes(model: nn.Module) -> Any:
    return train(model, lambda number: model(X, 0.1 * number), 6)


@habit
def an_attribute_changes(model: nn.Module) -> Any:
    def step(number: int) -> Tensor:
        model.shift = 0.05 * number
        return model(X)

    return train(model, step, 6)


@habit
def an_argument_is_now_an_int_and_now_of_numpy(model: nn.Module) -> Any:
    return train(model, lambda number: model(X, number)) + train(model, lambda number: model(X, np.float32(number)))


@habit
def arguments_go_by_position_and_by_name(model: nn.Module) -> Any:
    return train(model, lambda number: model(X, kind="ab"[number % 2]) if number % 2 else model(x=X), 5)


@habit
def an_argument_is_a_list_or_an_object(model: nn.Module) -> Any:
    return train(model, lambda number: model(X, kind=[1, 2, 3][:number])) + train(
        model, lambda _: model(X, kind=object())
    )


@habit
def a_batch_of_other_features_is_skipped(model: nn.Module) -> Any:
    def step(number: int) -> Tensor:
        if number == 1:
            with pytest.raises(RuntimeError):
                model(torch.randn(5, 9))
        return model(X)

    return train(model, step)


@habit
def the_dtype_changes(model: nn.Module) -> Any:
    before = train(model, lambda _: model(X), 2)
    model.double()
    return before + train(model, lambda _: model(X.double()), 2)


@habit
def weights_are_assigned(model: nn.Module) -> Any:
    before = train(model, lambda _: model(X), 2)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
    return before + train(model, lambda _: model(X), 2)


@habit
def a_module_is_pruned_then_parametrised(model: nn.Module) -> Any:
    before = train(model, lambda _: model(X), 2)
    prune.l1_unstructured(model.first, "weight", 0.3)
    pruned = train(model, lambda _: model(X), 2)
    parametrizations.weight_norm(model.second)
    return before + pruned + train(model, lambda _: model(X), 2)


@habit
def a_module_is_replaced(model: nn.Module) -> Any:
    before = train(model, lambda _: model(X), 2)
    model.second = nn.Sequential(model.second, nn.Linear(8, 3))
    return before + train(model, lambda _: model(X), 2)


@habit
def the_model_is_pickled(model: nn.Module) -> Any:
    before, file = train(model, lambda _: model(X), 2), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return before + train(again, lambda _: again(X), 2)


@habit
def another_thread_trains(model: nn.Module) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(train(model, lambda _: model(X))))
    thread.start()
    thread.join()
    return found


@habit
def generators_are_forked(model: nn.Module) -> Any:
    def step(number: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(number)
            return model(X)

    return train(model, step)


@habit
def layers_are_frozen_in_turn(model: nn.Module) -> Any:
    def step(number: int) -> Tensor:
        model.first.requires_grad_(number % 2 == 0)
        return model(X)

    return train(model, step, 5)


@habit
def a_validation_and_a_buffer_of_weights(model: nn.Module) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)

    def step(_: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            seen = model(X * 3)
        model.train()
        average.update_parameters(model)
        return model(X) + seen

    return [train(model, step), average.module(X)]


def halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


@habit
def hooks_on_weights_and_modules(model: nn.Module) -> Any:
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)
    model.second.weight.register_post_accumulate_grad_hook(halve)
    before = train(model, lambda _: model(X))
    model.second.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    model.first.register_forward_hook(lambda module, given, result: result * 2)
    return before + train(model, lambda _: model(X))


@habit
def gradients_are_asked_for(model: nn.Module) -> Any:
    given = X.clone().requires_grad_()
    loss = model(given).square().sum()
    found = torch.autograd.grad(loss, [given, model.second.weight], retain_graph=True)
    loss.backward(torch.tensor(2.5), retain_graph=True)
    loss.backward(inputs=[model.first.weight])
    return [*found, left(model)]


@habit
def perturbed_inputs(model: nn.Module) -> Any:
    def step(_: int) -> Tensor:
        moved = torch.zeros_like(X, requires_grad=True)
        model(X + moved).square().sum().backward()
        model.zero_grad()
        return model((X + 0.1 * moved.grad.sign()).detach())

    return train(model, step)


@habit
def perturbed_weights(model: nn.Module) -> Any:
    def step(_: int) -> Tensor:
        model(X).square().mean().backward()
        before = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for one in model.parameters():
                one.add_(one.grad, alpha=0.05)
        model.zero_grad()
        model(X).square().mean().backward()
        with torch.no_grad():
            for one, value in zip(model.parameters(), before, strict=True):
                one.copy_(value)
        return model(X)

    return train(model, step)


@habit
def a_closure(model: nn.Module) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(2)]


@habit
def weights_change_before_the_backward(model: nn.Module) -> Any:
    loss = model(X).square().sum()
    with torch.no_grad():
        model.second.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    return train(model, lambda _: model(X))


@habit
def outputs_are_changed_and_kept(model: nn.Module) -> Any:
    bank = [torch.zeros(5, 8)]

    def step(_: int) -> Tensor:
        result = model(X)
        result.mul_(2).add_(1)
        bank.append(result.detach())
        return result - bank[-2]

    return train(model, step, 4)


@habit
def states_are_carried(model: nn.Module) -> Any:
    state = [X]

    def step(_: int) -> Tensor:
        state.append(model(state[-1].detach()))
        return state[-1]

    def through_time(_: int) -> Tensor:
        hidden = X
        for _ in range(3):
            hidden = model(hidden)
        return hidden

    return train(model, step, 4) + train(model, through_time)


@habit
def backwards_in_another_order(model: nn.Module) -> Any:
    first, second = model(X).square().sum(), model(X * 2).square().sum()
    second.backward()
    first.backward()
    dropped = model(X).sum()
    del dropped
    return [left(model), train(model, lambda _: model(X))]


@habit
def accumulation_with_clipping_and_a_scaler(model: nn.Module) -> Any:
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=128.0)
    norms = []
    for number in range(6):
        scaler.scale(model(X * (number + 1)).square().mean() / 2).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=number % 4 == 1)
    return [norms, [one.detach() for one in model.parameters()]]


@habit
def inputs_of_other_strides(model: nn.Module) -> Any:
    large = torch.randn(10, 8)
    inputs = [X, torch.randn(8, 5).t(), X[:1].expand(5, 8), large[1:6], large[2:7]]
    return train(model, lambda number: model(inputs[number]), 5)


@habit
def hooks_on_saved_tensors(model: nn.Module) -> Any:
    def step(number: int) -> Tensor:
        with torch.autograd.graph.save_on_cpu() if number else torch.autograd.set_detect_anomaly(True):
            return model(X)

    return train(model, step)


def flat(value: Any) -> list[Any]:
    """The tensors, and None, in lists of lists."""
    return [one for part in value for one in flat(part)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("breaks", [False, True], ids=["", "breaks"])
@pytest.mark.parametrize("run", HABITS, ids=lambda run: run.__name__)
def test_habit(run: Habit, breaks: bool) -> None:
    torch.manual_seed(0)
    plain = Model(breaks)
    ours = memopt.optimize(copy.deepcopy(plain), 1, **EXACT)
    found = []
    for model in (plain, ours):
        torch.manual_seed(1)
        found.append(flat(run(model)))
    assert len(found[0]) == len(found[1])
    for expected, value in zip(*found, strict=True):
        assert (expected is None) == (value is None)
        assert expected is None or torch.equal(expected, value)
