"""Training with parameters in bfloat16: what survives, what is saved, what it is priced at."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import memopt
from memopt.device.devices import hardware
from memopt.levers.optimizer_levers import BF16_PARAMETERS, PricedLevers, TrainingFacts
from memopt.optimizers import (
    BF16ParametersOptimizer,
    parameterwise,
    use_bf16_parameters,
)
from tests.marks import slow
from tests.optimizers.pieces import (
    OPTIMIZERS,
    Choice,
    large_gpt2,
    losses,
    measured_step,
    priced,
    same,
    saved_and_loaded,
    small_gpt2,
    some_parameters,
    tells,
    text,
    train,
    values,
)

CHOICE = Choice(bf16_parameters=True)


class Holder(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


def wrapped(
    make: Callable[..., optim.Optimizer], parameters: list[nn.Parameter], **options: Any
) -> BF16ParametersOptimizer:
    return use_bf16_parameters(Holder(parameters), make(parameters), **options)


@pytest.mark.parametrize("piece_elements", [2**21, 128])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_is_that_of_float32_rounded_to_a_neighbour(
    make: Callable[..., optim.Optimizer], piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameterwise, "PIECE_ELEMENTS", piece_elements)
    wide, narrow = some_parameters(), some_parameters()
    with torch.no_grad():
        for parameter in wide:
            parameter.copy_(parameter.bfloat16())
    plain, optimizer = make(wide), wrapped(make, narrow)
    train(plain, wide, range(1))
    train(optimizer, narrow, range(1))
    assert all(parameter.dtype is torch.bfloat16 for parameter in narrow)
    for mine, other in zip(narrow, wide, strict=True):
        assert is_neighbour(mine, other)
        kept = optimizer.state[mine]
        assert kept.keys() == plain.state[other].keys()
        assert all(torch.equal(value, plain.state[other][key]) for key, value in kept.items() if value is not None)


def is_neighbour(narrow: torch.Tensor, wide: torch.Tensor) -> bool:
    """Whether all values in bfloat16, with 8 bits each, are one of the two next to those in float32."""
    return bool(((narrow.float() - wide).abs() < 2**-7 * wide.abs()).logical_or(narrow == wide).all())


def stepped(optimizer: optim.Optimizer, parameter: nn.Parameter, steps: int) -> torch.Tensor:
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.detach().float()


def test_updates_far_below_the_resolution_survive() -> None:
    """400 steps of 2e-5 on weights of 1, where bfloat16 has steps of 7.8e-3 upwards and half that downwards."""
    plain, chance = (nn.Parameter(torch.ones(4000, dtype=torch.bfloat16)) for _ in range(2))
    make = partial(optim.SGD, lr=2e-5)
    assert torch.equal(stepped(make([plain]), plain, 400), torch.ones(4000))
    after = stepped(BF16ParametersOptimizer(make([chance])), chance, 400)
    assert len(after.unique()) > 1
    # Each of 4000 is a sum of 400 throws of one step in 195: off by 1.4 steps of 3.9e-3, the mean 60 times less.
    assert abs(after.mean().item() - 0.992) < 5 * 1.5 * 3.9e-3 / 4000**0.5


def test_a_resumed_run_is_bitwise_the_same(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[BF16ParametersOptimizer, Any, list[nn.Parameter]]:
        made = some_parameters()
        optimizer = wrapped(optim.AdamW, made, seed=seed)
        return optimizer, optim.lr_scheduler.StepLR(optimizer, 2, 0.5), made

    optimizer, scheduler, whole = build(seed=3)
    train(optimizer, whole, range(4), scheduler)
    weights = values(whole)
    saved = saved_and_loaded({"o": optimizer.state_dict(), "s": scheduler.state_dict()}, tmp_path / "state.pt")
    train(optimizer, whole, range(4, 8), scheduler)
    resumed, scheduler, again = build(seed=99)
    with torch.no_grad():
        for parameter, value in zip(again, weights, strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved["o"])
    scheduler.load_state_dict(saved["s"])
    train(resumed, again, range(4, 8), scheduler)
    assert same(values(again), values(whole))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 1e-3
    assert resumed.state[again[0]]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_go_on_alike(copied: Callable[[Any], Any]) -> None:
    made = some_parameters()
    optimizer = wrapped(optim.AdamW, made)
    train(optimizer, made, range(2))
    other = copied(optimizer)
    others = other.param_groups[0]["params"]
    train(optimizer, made, range(2, 4))
    train(other, others, range(2, 4))
    assert same(values(others), values(made))


def test_what_was_learned_before_is_kept() -> None:
    wide, narrow = some_parameters(), some_parameters()
    plain, begun = optim.AdamW(wide), optim.AdamW(narrow)
    train(plain, wide, range(3))
    train(begun, narrow, range(3))
    scheduler = optim.lr_scheduler.StepLR(begun, 1, 0.5)  # of the optimiser inside
    optimizer = use_bf16_parameters(Holder(narrow), begun)
    train(plain, wide, range(3, 4))
    train(optimizer, narrow, range(3, 4))
    for mine, other in zip(narrow, wide, strict=True):
        assert all(torch.equal(value, plain.state[other][key]) for key, value in optimizer.state[mine].items())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5e-3


def test_groups_frozen_parameters_and_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
    model[3].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": [*model[1].parameters(), model[3].weight]}]
    optimizer = use_bf16_parameters(model, optim.AdamW(groups))
    assert {parameter.dtype for parameter in model[1].parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in (*model[0].parameters(), *model[3].parameters())} == {torch.bfloat16}
    model(torch.randn(5, 3, 6, 6, dtype=torch.bfloat16)).sum().backward()
    before = values(model.parameters())
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [True, True, True, True, True, False]
    late = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones_like(late)
    optimizer.step()
    assert late.detach().float().max() < 0


def test_gpt2_learns_about_as_in_float32() -> None:
    make = partial(optim.AdamW, lr=3e-3)
    plain, narrow = small_gpt2(), small_gpt2()
    batch = text()
    expected = losses(plain, make(plain.parameters()), batch, 40)
    found = losses(narrow, use_bf16_parameters(narrow, make(narrow.parameters())), batch, 40)
    assert expected[-1] < 0.5 * expected[0]
    assert found[-1] == pytest.approx(expected[-1], abs=0.05 * (expected[0] - expected[-1]))


def test_the_train_step_drives_it_with_clipping_scaler_and_scheduler() -> None:
    model = small_gpt2()
    optimizer = use_bf16_parameters(model, optim.AdamW(model.parameters()))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step = memopt.TrainStep(model, optimizer, 1.0, scheduler, scaler=scaler)
    assert step(text()).stepped
    assert optimizer.param_groups[0]["lr"] == 0.5e-3
    before = values(model.parameters())
    scaler.update(float("inf"))  # the next gradients overflow
    result = step(text())
    assert result.skipped
    assert same(values(model.parameters()), before)


@pytest.mark.parametrize("make", [optim.AdamW, *map(slow, (optim.SGD, optim.Adafactor))])
def test_bytes_are_told(make: Callable[..., optim.Optimizer]) -> None:
    def build() -> tuple[optim.Optimizer, list[nn.Parameter]]:
        model = large_gpt2()
        return use_bf16_parameters(model, make(model.parameters())), list(model.parameters())

    parameters = list(large_gpt2().parameters())
    found = priced(parameters, make, "cpu", CHOICE)
    assert found.before.parameters >= 20 * 1024**2
    assert 2 * found.after.parameters == found.before.parameters
    assert 2 * found.after.gradients == found.before.gradients
    assert tells(found.after.total, measured_step(build))


def test_frozen_parameters_and_kept_ones_are_priced_as_they_will_be() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.BatchNorm1d(100), nn.Linear(100, 50, bias=False))
    model[2].weight.requires_grad_(False)
    found = PricedLevers.of(TrainingFacts.of(model, "sgd", hardware("h100")), [BF16_PARAMETERS])
    assert found.after.parameters == 2 * 10_000 + 4 * 200 + 2 * 5_000
    assert found.after.gradients == 2 * 10_000 + 4 * 200
    assert found.added_seconds > 0


def test_refusals() -> None:
    some = some_parameters()
    optimizer = wrapped(optim.AdamW, some)
    with pytest.raises(ValueError, match="bf16_parameters steps without a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="LBFGS evaluates the model"):
        BF16ParametersOptimizer(optim.LBFGS(some))
    with pytest.raises(TypeError, match="wraps a"):
        BF16ParametersOptimizer(some)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the state was saved by a plain optimizer"):
        optimizer.load_state_dict(optim.AdamW(some).state_dict())
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters"):
        optimizer.load_state_dict(BF16ParametersOptimizer(optim.AdamW(some[:1])).state_dict())


def test_a_gradient_in_another_order_of_memory() -> None:
    wide, narrow = some_parameters(), some_parameters()
    with torch.no_grad():
        wide[2].copy_(wide[2].bfloat16())
    plain, optimizer = optim.AdamW(wide), wrapped(optim.AdamW, narrow)
    gradient = torch.randn(8, 3, 5, 5).bfloat16()
    narrow[2].grad, wide[2].grad = gradient, gradient.float()
    assert narrow[2].stride() != gradient.stride()
    optimizer.step()
    plain.step()
    assert is_neighbour(narrow[2], wide[2])


class Counting(optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


def test_an_optimizer_that_counts_in_its_groups_is_refused() -> None:
    some = some_parameters()
    with pytest.raises(ValueError, match="Counting changes the option 'count' of its parameter group"):
        train(wrapped(Counting, some), some, range(1))
