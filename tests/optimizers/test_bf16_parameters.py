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
from memopt.levers.bf16_parameters import BF16_PARAMETERS
from memopt.levers.optimizer_levers import PricedLevers
from memopt.levers.training_price import TrainingFacts
from memopt.optimizers import (
    BF16ParametersOptimizer,
    Rounding,
    one_parameter,
    use_bf16_parameters,
)
from memopt.optimizers.bf16_parameters import joined
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

ROUNDINGS: tuple[Rounding, ...] = ("stochastic", "compensated")


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
def test_compensated_steps_are_those_of_float32_bit_by_bit(
    make: Callable[..., optim.Optimizer], piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_parameter, "PIECE_ELEMENTS", piece_elements)
    wide, narrow = some_parameters(), some_parameters()
    plain, optimizer = make(wide), wrapped(make, narrow, rounding="compensated")
    train(plain, wide, range(6))
    train(optimizer, narrow, range(6))
    assert all(parameter.dtype is torch.bfloat16 for parameter in narrow)
    assert same([joined(parameter, optimizer.state[parameter]["low_bits"]) for parameter in narrow], values(wide))
    for mine, other in zip(narrow, wide, strict=True):
        kept = {key: value for key, value in optimizer.state[mine].items() if key != "low_bits"}
        assert kept.keys() == plain.state[other].keys()
        assert all(torch.equal(value, plain.state[other][key]) for key, value in kept.items() if value is not None)


def stepped(optimizer: optim.Optimizer, parameter: nn.Parameter, steps: int) -> torch.Tensor:
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return parameter.detach().float()


def test_updates_far_below_the_resolution_survive() -> None:
    """400 steps of 2e-5 on weights of 1, where bfloat16 has steps of 7.8e-3 upwards and half that downwards."""
    plain, chance, exact = (nn.Parameter(torch.ones(4000, dtype=torch.bfloat16)) for _ in range(3))
    make = partial(optim.SGD, lr=2e-5)
    assert torch.equal(stepped(make([plain]), plain, 400), torch.ones(4000))
    after = stepped(BF16ParametersOptimizer(make([chance])), chance, 400)
    assert len(after.unique()) > 1
    # Each of 4000 is a sum of 400 throws of one step in 195: off by 1.4 steps of 3.9e-3, the mean 60 times less.
    assert abs(after.mean().item() - 0.992) < 5 * 1.5 * 3.9e-3 / 4000**0.5
    optimizer = BF16ParametersOptimizer(make([exact]), "compensated")
    stepped(optimizer, exact, 400)
    reference = nn.Parameter(torch.ones(4000))
    stepped(make([reference]), reference, 400)
    assert torch.equal(joined(exact, optimizer.state[exact]["low_bits"]), reference.detach())


def test_a_second_moment_in_16_bits_decays_in_expectation() -> None:
    parameter = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    optimizer = BF16ParametersOptimizer(optim.Adam([parameter], lr=0.0), state_dtype=torch.bfloat16)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(500):
        optimizer.step()
    kept = optimizer.state[parameter]["exp_avg_sq"]
    assert kept.dtype is torch.bfloat16
    assert kept.double().mean().item() == pytest.approx(1e-3 * 0.999**500, rel=0.01)
    plain = torch.tensor(1e-3, dtype=torch.bfloat16)
    assert plain.mul(0.999) == plain  # rounded to nearest it would stay


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_resumed_run_is_bitwise_the_same(rounding: Rounding, state_dtype: torch.dtype, tmp_path: Path) -> None:
    def build(seed: int) -> tuple[BF16ParametersOptimizer, Any, list[nn.Parameter]]:
        made = some_parameters()
        optimizer = wrapped(optim.AdamW, made, rounding=rounding, state_dtype=state_dtype, seed=seed)
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
    assert resumed.state[again[0]]["exp_avg"].dtype is state_dtype


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
    optimizer = use_bf16_parameters(Holder(narrow), begun, "compensated")
    train(plain, wide, range(3, 6))
    train(optimizer, narrow, range(3, 6))
    assert same([joined(parameter, optimizer.state[parameter]["low_bits"]) for parameter in narrow], values(wide))
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


@pytest.mark.parametrize("rounding", [slow(one) if one == "stochastic" else one for one in ROUNDINGS])
def test_gpt2_learns_about_as_in_float32(rounding: Rounding) -> None:
    make = partial(optim.AdamW, lr=3e-3)
    plain, narrow = small_gpt2(), small_gpt2()
    batch = text()
    expected = losses(plain, make(plain.parameters()), batch, 40)
    found = losses(narrow, use_bf16_parameters(narrow, make(narrow.parameters()), rounding), batch, 40)
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


CASES: dict[str, tuple[Callable[..., optim.Optimizer], Rounding, torch.dtype]] = {
    "adamw-stochastic": (optim.AdamW, "stochastic", torch.float32),
    "adamw-compensated": (optim.AdamW, "compensated", torch.float32),
    "adamw-narrow-state": (optim.AdamW, "stochastic", torch.bfloat16),
    "sgd-stochastic": (optim.SGD, "stochastic", torch.float32),
    "adafactor-compensated": (optim.Adafactor, "compensated", torch.float32),
}


QUICK = "adamw-narrow-state"


@pytest.mark.parametrize(
    ("make", "rounding", "state_dtype"),
    [case if name == QUICK else slow(*case) for name, case in CASES.items()],
    ids=CASES.keys(),
)
def test_bytes_are_told(make: Callable[..., optim.Optimizer], rounding: Rounding, state_dtype: torch.dtype) -> None:
    def build() -> tuple[optim.Optimizer, list[nn.Parameter]]:
        model = large_gpt2()
        made = use_bf16_parameters(model, make(model.parameters()), rounding, state_dtype=state_dtype)
        return made, list(model.parameters())

    parameters = list(large_gpt2().parameters())
    proposals = Choice(bf16_parameters=rounding, state_dtype=state_dtype)
    found = priced(parameters, make, "cpu", proposals)
    assert found.before.parameters >= 20 * 1024**2
    assert 2 * found.after.parameters == found.before.parameters
    assert 2 * found.after.gradients == found.before.gradients
    assert tells(found.after.total, measured_step(build))


def test_the_state_of_each_choice() -> None:
    parameters = [nn.Parameter(torch.empty(2**23, device="meta"))]  # more than three pieces
    per_element = {
        (rounding, dtype): priced(
            parameters, "adamw", "h100", Choice(bf16_parameters=rounding, state_dtype=dtype)
        ).after.optimizer_state
        // 2**23
        for rounding in ROUNDINGS
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert list(per_element.values()) == [8, 4, 10, 6]


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
    with pytest.raises(ValueError, match="rounding must be one of stochastic, compensated, not 'nearest'"):
        BF16ParametersOptimizer(optim.SGD(some), "nearest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="state_dtype must be"):
        BF16ParametersOptimizer(optim.SGD(some), state_dtype=torch.float16)
    with pytest.raises(ValueError, match="LBFGS evaluates the model"):
        BF16ParametersOptimizer(optim.LBFGS(some))
    with pytest.raises(TypeError, match="wraps a"):
        BF16ParametersOptimizer(some)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the state is of a plain optimizer"):
        optimizer.load_state_dict(optim.AdamW(some).state_dict())
    other = BF16ParametersOptimizer(optim.AdamW(some), "compensated").state_dict()
    with pytest.raises(ValueError, match="the state is of rounding=compensated"):
        optimizer.load_state_dict(other)
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters"):
        optimizer.load_state_dict(BF16ParametersOptimizer(optim.AdamW(some[:1])).state_dict())


def test_a_gradient_in_another_order_of_memory() -> None:
    wide, narrow = some_parameters(), some_parameters()
    plain, optimizer = optim.AdamW(wide), wrapped(optim.AdamW, narrow, rounding="compensated")
    gradient = torch.randn(8, 3, 5, 5).bfloat16()
    narrow[2].grad, wide[2].grad = gradient, gradient.float()
    assert narrow[2].stride() != gradient.stride()
    optimizer.step()
    plain.step()
    assert torch.equal(joined(narrow[2], optimizer.state[narrow[2]]["low_bits"]), wide[2].detach())


class Counting(optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


def test_an_optimizer_that_counts_in_its_groups_is_refused() -> None:
    some = some_parameters()
    with pytest.raises(ValueError, match="Counting changes 'count' of its group"):
        train(wrapped(Counting, some), some, range(1))
