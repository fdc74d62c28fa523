"""Adam with 8-bit moments: it learns as in float32, and takes the bytes that it is priced at."""

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
from examples.models.families import library
from memopt.optimizers import (
    BF16ParametersOptimizer,
    LowBitOptimizer,
    OffloadedOptimizer,
    OptimizerInBackward,
    parameterwise,
)
from tests.marks import slow
from tests.optimizers.pieces import (
    Choice,
    large_gpt2,
    losses,
    measured_step,
    priced,
    same,
    saved_and_loaded,
    tells,
    text,
    train,
    values,
)
from tests.train.pieces import GPT2

# Its matrices are large enough for 8 bits.
gpt2 = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **{**GPT2, "n_embd": 64}
)  # fmt: skip


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in ((67, 97), (100,), (64, 8, 3, 3), (8, 512))]
    made[2] = made[2].to(memory_format=torch.channels_last)
    return [nn.Parameter(parameter) for parameter in made]


@pytest.mark.parametrize(
    "make",
    [optim.AdamW, partial(optim.Adam, amsgrad=True), partial(optim.AdamW, fused=True)],
    ids=["w", "ams", "fused"],
)
def test_gpt2_learns_about_as_in_float32(make: Callable[..., optim.Optimizer]) -> None:
    plain, low = gpt2(), gpt2()
    expected = losses(plain, make(plain.parameters(), lr=3e-3), text(), 25)
    optimizer = LowBitOptimizer(make(low.parameters(), lr=3e-3))
    found = losses(low, optimizer, text(), 25)
    assert expected[-1] < 0.3 * expected[0]
    assert found != expected
    assert found[-1] == pytest.approx(expected[-1], abs=0.02 * (expected[0] - expected[-1]))


def test_what_is_kept() -> None:
    made = parameters()
    optimizer = LowBitOptimizer(optim.AdamW(made))
    train(optimizer, made, range(2))
    large, small = optimizer.state[made[0]], optimizer.state[made[1]]
    assert large.keys() == {
        "step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales",
    }  # fmt: skip
    assert (large["exp_avg_codes"].dtype, large["exp_avg_codes"].numel()) == (torch.uint8, 67 * 97)
    assert large["exp_avg_scales"].shape == (26,)  # 6499 in blocks of 256
    assert small["exp_avg"].dtype is torch.float32
    assert float(large["step"]) == 2


def test_the_first_step_is_adams_and_small_parameters_are_stepped_as_ever() -> None:
    plain, low = parameters(), parameters()
    first, second = optim.AdamW(plain), LowBitOptimizer(optim.AdamW(low))
    train(first, plain, range(1))
    train(second, low, range(1))
    assert same(values(low), values(plain))
    train(first, plain, range(1, 5))
    train(second, low, range(1, 5))
    assert torch.equal(low[1], plain[1])
    assert not torch.equal(low[0], plain[0])


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[torch.Tensor]:
        made = parameters()
        train(LowBitOptimizer(optim.AdamW(made)), made, range(4))
        return values(made)

    whole = run()
    monkeypatch.setattr(parameterwise, "PIECE_ELEMENTS", 1024)
    assert same(run(), whole)


def test_a_resumed_run_is_bitwise_the_same(tmp_path: Path) -> None:
    whole = parameters()
    optimizer = LowBitOptimizer(optim.AdamW(whole))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    train(optimizer, whole, range(3), scheduler)
    weights, saved = values(whole), saved_and_loaded(optimizer.state_dict(), tmp_path / "state.pt")
    rate = scheduler.state_dict()
    train(optimizer, whole, range(3, 6), scheduler)
    again = [nn.Parameter(parameter) for parameter in weights]
    resumed = LowBitOptimizer(optim.AdamW(again))
    scheduler = optim.lr_scheduler.StepLR(resumed, 1, 0.9)
    resumed.load_state_dict(saved)
    scheduler.load_state_dict(rate)
    assert resumed.state[again[0]]["exp_avg_codes"].dtype is torch.uint8
    train(resumed, again, range(3, 6), scheduler)
    assert same(values(again), values(whole))


def test_what_was_learned_before_goes_along() -> None:
    plain, other = parameters(), parameters()
    expected, begun = optim.AdamW(plain), optim.AdamW(other)
    train(expected, plain, range(5))
    train(begun, other, range(5))
    optimizer = copy.deepcopy(LowBitOptimizer(begun))
    assert "exp_avg" not in begun.state[other[0]]
    others = optimizer.param_groups[0]["params"]
    train(expected, plain, range(5, 6))
    train(optimizer, others, range(5, 6))
    for mine, its, start in zip(others, plain, other, strict=True):
        moved, wanted = mine.detach() - start.detach(), its.detach() - start.detach()
        assert (moved - wanted).norm() <= 0.05 * wanted.norm()


def test_with_other_proposals() -> None:
    def run(wrap: Callable[[Any], optim.Optimizer], dtype: torch.dtype = torch.float32) -> list[float]:
        model = gpt2().to(dtype)
        return losses(model, wrap(LowBitOptimizer(optim.AdamW(model.parameters(), lr=3e-3))), text(), 8)

    alone = run(lambda low: low)
    assert run(OffloadedOptimizer) == alone
    assert run(OptimizerInBackward) == alone
    narrow = run(BF16ParametersOptimizer, torch.bfloat16)
    model = gpt2().bfloat16()
    inside = BF16ParametersOptimizer(optim.AdamW(model.parameters(), lr=3e-3))
    assert losses(model, LowBitOptimizer(inside), text(), 8) == narrow
    assert narrow[-1] == pytest.approx(alone[-1], abs=0.05 * (alone[0] - alone[-1]))
    assert run(lambda low: low, torch.bfloat16)[-1] < alone[0]


def test_the_train_step_drives_it() -> None:
    model = gpt2()
    optimizer = LowBitOptimizer(optim.AdamW(model.parameters(), lr=3e-3))
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    step = memopt.TrainStep(model, optimizer, 1.0, scheduler, scaler=scaler)
    first = float(step(text()).loss)
    assert float(step(text()).loss) < first
    assert optimizer.param_groups[0]["lr"] == 3e-3 / 4
    before = values(model.parameters())
    scaler.update(float("inf"))  # the next gradients overflow
    assert step(text()).skipped
    assert same(values(model.parameters()), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [optim.AdamW, *map(slow, [partial(optim.Adam, amsgrad=True), partial(optim.AdamW, fused=True)])]
)
def test_bytes_are_told(make: Callable[..., optim.Optimizer]) -> None:
    def build() -> tuple[optim.Optimizer, Sequence[nn.Parameter]]:
        made = list(large_gpt2().parameters())
        return LowBitOptimizer(make(made)), made

    given = list(large_gpt2().parameters())
    found = priced(given, make, "cpu", Choice(low_bit_optimizer=True))
    assert found.before.parameters >= 20 * 1024**2
    assert (found.before.optimizer_state - found.after.optimizer_state) > 0.7 * found.before.optimizer_state
    assert tells(found.after.total, measured_step(build))


def test_two_bytes_and_two_scales_an_element() -> None:
    given = [nn.Parameter(torch.empty(2**13, 2**11, device="meta")), nn.Parameter(torch.empty(100, device="meta"))]
    found = priced(given, "adamw", "h100", Choice(low_bit_optimizer=True))
    elements = 2**24
    blocks = 2 * 512 + 2 * 512  # the small parameter's moments, and numbers of the step
    assert found.after.optimizer_state - 2 * (elements + elements // 256 * 4) in range(2 * 512, blocks + 1)
    assert found.before.optimizer_state == 8 * elements + 2 * 512
    assert found.added_seconds > 0


def test_other_optimizers_are_refused() -> None:
    made = parameters()
    with pytest.raises(ValueError, match="Adam and AdamW in 8 bits, not the state of SGD"):
        LowBitOptimizer(optim.SGD(made))
    with pytest.raises(ValueError, match="not the state of SGD"):
        LowBitOptimizer(BF16ParametersOptimizer(optim.SGD(made)))
    with pytest.raises(ValueError, match="not the state of LowBitOptimizer"):
        LowBitOptimizer(LowBitOptimizer(optim.Adam(made)))
    with pytest.raises(TypeError, match="wraps a"):
        LowBitOptimizer("adamw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="low_bit_optimizer steps without a closure"):
        LowBitOptimizer(optim.Adam(made)).step(lambda: 0.0)
    with pytest.raises(ValueError, match="Adam and AdamW"):
        priced(made, "sgd", "cpu", Choice(low_bit_optimizer=True))
