"""Optimiser state with the host: the same numbers, priced by bytes and by the link. Here the device is the CPU too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import memopt
from memopt.device.devices import hardware
from memopt.optimizers import (
    BF16ParametersOptimizer,
    LowBitOptimizer,
    OffloadedOptimizer,
    OptimizerInBackward,
    parameterwise,
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

DEVICE = Choice(offload_optimizer=True)


@pytest.mark.parametrize("piece_elements", [2**21, 128])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_equal_to_the_plain_step_bit_by_bit(
    make: Callable[..., optim.Optimizer], piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameterwise, "PIECE_ELEMENTS", piece_elements)
    plain, offloaded = some_parameters(), some_parameters()
    first, second = make(plain), OffloadedOptimizer(make(offloaded))
    train(first, plain, range(6))
    train(second, offloaded, range(6))
    assert same(values(offloaded), values(plain))
    for mine, other in zip(offloaded, plain, strict=True):
        assert second.state[mine].keys() == first.state[other].keys()
        for key, value in first.state[other].items():
            assert value is None or torch.equal(second.state[mine][key], value)


def test_what_inner_steps_are_copies() -> None:
    """On a GPU these are copies across the link: nothing of the kept state is stepped on the device."""
    made = [parameter for parameter in some_parameters() if parameter.dim()]  # a single number is not worth the way
    seen: list[tuple[int, int]] = []

    class Watched(optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for tensor, state in self.state.items():
                seen.append((tensor.data_ptr(), state["exp_avg"].data_ptr()))

    optimizer = OffloadedOptimizer(Watched(made))
    for step in range(2):
        for parameter in made:
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
    parameters = {parameter.data_ptr() for parameter in made}
    kept = {optimizer.state[parameter]["exp_avg"].data_ptr() for parameter in made}
    second = seen[len(made) :]
    assert all(tensor in parameters and state not in kept for tensor, state in second)


def test_state_dicts_serve_the_plain_optimizer_and_back(tmp_path: Path) -> None:
    plain, other = some_parameters(), some_parameters()
    expected, begun = optim.AdamW(plain), optim.AdamW(other)
    train(expected, plain, range(6))
    train(begun, other, range(2))
    middle = OffloadedOptimizer(optim.AdamW(other))
    middle.load_state_dict(saved_and_loaded(begun.state_dict(), tmp_path / "1.pt"))
    train(middle, other, range(2, 4))
    end = optim.AdamW(other)
    end.load_state_dict(saved_and_loaded(middle.state_dict(), tmp_path / "2.pt"))
    train(end, other, range(4, 6))
    assert same(values(other), values(plain))


def test_what_was_learned_before_goes_along_and_copies_go_on() -> None:
    plain, other = some_parameters(), some_parameters()
    expected, begun = optim.NAdam(plain), optim.NAdam(other)
    train(expected, plain, range(2))
    train(begun, other, range(2))
    optimizer = copy.deepcopy(OffloadedOptimizer(begun))
    train(expected, plain, range(2, 4))
    others = optimizer.param_groups[0]["params"]
    train(optimizer, others, range(2, 4))
    assert same(values(others), values(plain))


def test_around_and_within_other_proposals() -> None:
    def run(offload: bool, in_backward: bool) -> list[float]:
        model = small_gpt2()
        optimizer: optim.Optimizer = LowBitOptimizer(optim.AdamW(model.parameters()))
        optimizer = OffloadedOptimizer(optimizer) if offload else optimizer
        optimizer = OptimizerInBackward(optimizer) if in_backward else optimizer
        return losses(model, optimizer, text(), 4)

    expected = run(offload=False, in_backward=False)
    assert run(offload=True, in_backward=False) == expected
    assert run(offload=True, in_backward=True) == expected


def test_the_state_of_a_proposal_inside_is_saved_too(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[OffloadedOptimizer, list[nn.Parameter]]:
        made = [nn.Parameter(parameter.detach().bfloat16()) for parameter in some_parameters()]
        return OffloadedOptimizer(BF16ParametersOptimizer(optim.AdamW(made), seed)), made

    optimizer, whole = build(seed=3)
    train(optimizer, whole, range(2))
    weights, saved = values(whole), saved_and_loaded(optimizer.state_dict(), tmp_path / "state.pt")
    train(optimizer, whole, range(2, 4))
    resumed, again = build(seed=4)
    with torch.no_grad():
        for parameter, value in zip(again, weights, strict=True):
            parameter.copy_(value)
    resumed.load_state_dict(saved)
    train(resumed, again, range(2, 4))
    assert same(values(again), values(whole))
    with pytest.raises(ValueError, match="the state was saved by a plain optimizer"):
        resumed.load_state_dict(optim.AdamW(whole).state_dict())


def test_the_train_step_drives_it() -> None:
    def run(offload: bool) -> list[float]:
        model = small_gpt2()
        optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = OffloadedOptimizer(optimizer) if offload else optimizer
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = memopt.TrainStep(
            model, optimizer, 0.5, scheduler, accumulate=2, scaler=torch.amp.GradScaler("cpu", init_scale=64.0)
        )
        return [float(step(text(seed=seed)).loss) for seed in range(6)]

    assert run(offload=True) == run(offload=False)


@pytest.mark.slow
@pytest.mark.parametrize("make", [optim.AdamW, *map(slow, (partial(optim.SGD, lr=0.1, momentum=0.9), optim.Adafactor))])
def test_bytes_are_told(make: Callable[..., optim.Optimizer]) -> None:
    """On the CPU the meter sees the device's bytes and the host's together."""

    def build() -> tuple[optim.Optimizer, Sequence[nn.Parameter]]:
        parameters = list(large_gpt2().parameters())
        return OffloadedOptimizer(make(parameters)), parameters

    parameters = list(large_gpt2().parameters())
    found = priced(parameters, make, "cpu", DEVICE)
    assert found.before.parameters >= 20 * 1024**2
    assert found.after.optimizer_state == 0
    assert tells(found.after.total + found.host_bytes, measured_step(build))


@pytest.mark.parametrize("card", ["t4", "h100"])
def test_the_link_of_the_card_sets_the_time(card: str) -> None:
    parameters, link = [nn.Parameter(torch.empty(2**24, device="meta"))], hardware(card).link
    pieces, ways, moments = 8, 2, 2
    # Two moments of float32 each way: 16 bytes an element.
    copies = 16 * 2**24 / link.bytes_per_second + pieces * ways * moments * link.latency_seconds
    assert priced(parameters, "adamw", card, DEVICE).added_seconds == pytest.approx(copies, rel=0.05)


def test_on_a_gpu_pinned_memory_comes_in_powers_of_two() -> None:
    parameters = [nn.Parameter(torch.empty(3, 2**20, device="meta"))]
    found = priced(parameters, "adamw", "h100", DEVICE)
    assert found.before.optimizer_state == 2 * 4 * 3 * 2**20
    assert 2 * 4 * 2**22 <= found.host_bytes <= 1.01 * 2 * 4 * 2**22 + 2**24
    assert (found.before.optimizer_state - found.after.optimizer_state) == found.before.optimizer_state
    fused = priced(parameters, partial(optim.AdamW, fused=True), "h100", DEVICE)
    assert fused.after.optimizer_state == 512, "a block of its own"
    stateless = priced(parameters, "sgd", "h100", DEVICE)
    assert stateless.host_bytes == 0
    assert (stateless.before.optimizer_state - stateless.after.optimizer_state) == 0


def test_refusals() -> None:
    some = some_parameters()
    with pytest.raises(ValueError, match="offload_optimizer steps without a closure"):
        OffloadedOptimizer(optim.SGD(some)).step(lambda: 0.0)
    with pytest.raises(ValueError, match="LBFGS evaluates the model"):
        OffloadedOptimizer(optim.LBFGS(some))
