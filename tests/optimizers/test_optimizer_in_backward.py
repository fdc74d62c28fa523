"""Stepping within the backward: the same numbers, fewer gradients held, and what cannot be done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import memopt
from memopt.account.optimizer_account import optimizer_account
from memopt.device.devices import hardware
from memopt.levers.optimizer_levers import OPTIMIZER_IN_BACKWARD, PricedLevers, TrainingFacts
from memopt.meter import measure_peak, resident_cpu_blocks
from memopt.optimizers import (
    LowBitOptimizer,
    OptimizerInBackward,
)
from tests.optimizers.pieces import OPTIMIZERS, large_gpt2, losses, same, saved_and_loaded, small_gpt2, text, values


def run(
    model: nn.Module, make: Callable[..., optim.Optimizer], in_backward: bool, steps: int = 4
) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = make(model.parameters())
    if in_backward:
        optimizer = OptimizerInBackward(optimizer)
    return losses(model, optimizer, text(), steps), values(model.parameters())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_equal_to_the_step_after_the_backward_bit_by_bit(make: Callable[..., optim.Optimizer]) -> None:
    expected, weights = run(small_gpt2(), make, in_backward=False)
    found, same_weights = run(small_gpt2(), make, in_backward=True)
    assert found == expected
    assert same(same_weights, weights)
    assert len(set(expected)) == len(expected)


def test_gradients_are_gone_when_the_backward_ends() -> None:
    model = small_gpt2()
    optimizer = OptimizerInBackward(optim.AdamW(model.parameters()))
    before = values(model.parameters())
    model(**text()).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    after = values(model.parameters())
    assert not any(map(torch.equal, before, after))
    optimizer.step()  # does nothing more
    assert same(values(model.parameters()), after)


def test_groups_schedulers_frozen_parameters_and_later_groups() -> None:
    def train(in_backward: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        model[0].bias.requires_grad_(False)
        optimizer: optim.Optimizer = optim.Adam([{"params": model[0].parameters(), "lr": 0.1}], lr=0.01)
        optimizer = OptimizerInBackward(optimizer) if in_backward else optimizer
        optimizer.add_param_group({"params": model[2].parameters()})
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            if step == 2:
                model[0].bias.requires_grad_(True)
            model(torch.linspace(-1, 1, 12).reshape(2, 6)).square().sum().backward()
            optimizer.step()
            model.zero_grad()
            scheduler.step()
        assert model[4].weight.grad is None
        return values(model.parameters())

    assert same(train(in_backward=True), train(in_backward=False))


def test_its_state_is_the_plain_optimizers(tmp_path: Path) -> None:
    plain, model = small_gpt2(), small_gpt2()
    expected = losses(plain, optim.AdamW(plain.parameters()), text(), 6)
    first = optim.AdamW(model.parameters())
    assert losses(model, first, text(), 2) == expected[:2]
    second = OptimizerInBackward(optim.AdamW(model.parameters()))
    second.load_state_dict(saved_and_loaded(first.state_dict(), tmp_path / "first.pt"))
    assert losses(model, second, text(), 2) == expected[2:4]
    saved = saved_and_loaded(second.state_dict(), tmp_path / "second.pt")
    second.detach()
    third = optim.AdamW(model.parameters())
    third.load_state_dict(saved)
    assert losses(model, third, text(), 2) == expected[4:]


def test_detached_and_copied_it_is_a_plain_one_again() -> None:
    model = small_gpt2()
    optimizer = OptimizerInBackward(optim.AdamW(model.parameters()))
    other, twin = copy.deepcopy((model, optimizer))
    inner = optimizer.detach()
    for trained, its in ((model, inner), (other, twin)):
        trained(**text()).loss.backward()
        assert all(parameter.grad is not None for parameter in trained.parameters())
        its.step()
    assert same(values(model.parameters()), values(other.parameters()))


def test_around_another_proposal() -> None:
    def train(in_backward: bool) -> list[float]:
        model = small_gpt2()
        optimizer: optim.Optimizer = LowBitOptimizer(optim.AdamW(model.parameters()))
        optimizer = OptimizerInBackward(optimizer) if in_backward else optimizer
        return losses(model, optimizer, text(), 4)

    assert train(in_backward=True) == train(in_backward=False)


@pytest.mark.slow
@pytest.mark.plans_always
def test_an_optimized_model_is_stepped_alike() -> None:
    def train(in_backward: bool) -> list[torch.Tensor]:
        model = small_gpt2()
        optimizer: optim.Optimizer = optim.AdamW(model.parameters())
        optimizer = OptimizerInBackward(optimizer) if in_backward else optimizer
        memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute"})
        losses(model, optimizer, text(), 2)
        return values(model.parameters())

    assert same(train(in_backward=True), train(in_backward=False))


def test_a_second_backward_is_refused_before_it_steps_anything_twice() -> None:
    model = nn.Linear(3, 1)
    optimizer = OptimizerInBackward(optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3)).sum().backward()
    once = values(model.parameters())
    with pytest.raises(ValueError, match="a second gradient before"):
        model(torch.ones(1, 3)).sum().backward()
    assert same(values(model.parameters()), once)
    model.zero_grad()
    optimizer.step()
    model(torch.ones(1, 3)).sum().backward()
    assert not same(values(model.parameters()), once)


def test_closures_are_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = OptimizerInBackward(optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="optimizer_in_backward steps without a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="LBFGS evaluates the model"):
        OptimizerInBackward(optim.LBFGS(model.parameters()))


def deep() -> nn.Module:
    """21 MB, of which a batch of one sample makes next to no activations."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(512, 512), nn.ReLU())))


def peak_of_step(make: Callable[..., optim.Optimizer], build: Callable[[], nn.Module], loss: Any) -> tuple[int, int]:
    """The highest peak of two whole steps, and what their forward holds."""
    before = sum(resident_cpu_blocks().values())
    model = build()
    optimizer = make(model.parameters())
    peaks = []
    for _ in range(2):
        with measure_peak("cpu") as peak:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(peak.bytes - before)
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.detach()
    with measure_peak("cpu") as forward:
        loss(model)
    return max(peaks), forward.allocated_bytes


@pytest.mark.parametrize("make", [optim.AdamW, partial(optim.SGD, lr=0.1), optim.Adafactor])
def test_bytes_are_told(make: Callable[..., optim.Optimizer]) -> None:
    model = deep()
    found = PricedLevers.of(TrainingFacts.of(model, make, hardware("cpu")), [OPTIMIZER_IN_BACKWARD])
    assert found.after.gradients == 4 * (512 * 512 + 512)
    measured, activations = peak_of_step(
        lambda p: OptimizerInBackward(make(p)), deep, lambda m: m(torch.ones(1, 512)).sum()
    )
    assert found.before.parameters >= 20 * 1024**2
    assert activations < 0.02 * measured
    assert measured <= found.after.total + activations <= 1.02 * measured


def test_a_tied_gradient_waits_for_its_last_use() -> None:
    def loss(model: nn.Module) -> Any:
        return model(**text(8192, samples=1, length=4)).loss

    make = partial(optim.SGD, lr=0.1)
    facts = TrainingFacts.of(large_gpt2(), make, hardware("cpu"))
    assert [tuple(parameter.shape) for parameter in facts.shared] == [(8192, 256)]
    found = PricedLevers.of(facts, [OPTIMIZER_IN_BACKWARD])
    plain, _ = peak_of_step(make, large_gpt2, loss)
    measured, _ = peak_of_step(lambda p: OptimizerInBackward(make(p)), large_gpt2, loss)
    # The tied gradient's second part is a temporary of the backward, with or without; nothing else waits then.
    assert 0.9 * (plain - measured) <= (found.before.gradients - found.after.gradients) <= plain - measured


def test_the_trial_of_an_instance_leaves_it_alone() -> None:
    model = small_gpt2()
    optimizer = OptimizerInBackward(optim.AdamW(model.parameters()))
    account = optimizer_account(optimizer, [])
    assert account.state_bytes == optimizer_account("adamw", model.parameters()).state_bytes
    assert not optimizer.state
    model(**text()).loss.backward()
    assert len(optimizer.state) == len(list(model.parameters()))
