"""fp16 from a scale that overflows: what a correct hand-written loop does, to the bit, and what wrong ones do."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from memopt import TrainStep
from memopt.train.scaling import Scaling, scaler_for
from tests.train import pieces
from tests.train.pieces import Record, gpt2, hand_written, record, regression, same, weights

OVERFLOWING = 2.0**24
BATCHES = [pieces.text(seed=seed) for seed in range(16)]


def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, torch.amp.GradScaler]:
    """The scale first overflows, then grows every three steps until it does again."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=OVERFLOWING, growth_interval=3)


@functools.cache
def by_hand(**mistake: bool) -> tuple[nn.Module, Record]:
    model = gpt2()
    torch.manual_seed(7)
    return model, hand_written(model, *parts(model), BATCHES, **mistake)


@functools.cache
def by_step() -> tuple[nn.Module, Record]:
    model = gpt2()
    optimizer, scheduler, scaler = parts(model)
    step = TrainStep(model, optimizer, 1.0, scheduler, scaler=scaler, autocast=torch.float16)
    torch.manual_seed(7)
    return model, record(step, BATCHES)


def test_the_sequence_is_that_of_a_correct_loop() -> None:
    (theirs, expected), (ours, found) = by_hand(), by_step()
    assert found.losses == expected.losses
    assert found.scales == expected.scales
    assert found.skips == expected.skips
    assert found.rates == expected.rates
    assert [n for n in found.norms if math.isfinite(n)] == [n for n in expected.norms if math.isfinite(n)]
    assert same(weights(ours), weights(theirs))


def test_the_sequence_has_what_it_is_to_show() -> None:
    _, found = by_step()
    first = found.skips.index(False)
    assert first >= 2, "the first scale overflows"
    assert any(found.skips[first:]), "a scale grown too large overflows again"
    assert max(found.scales[first:]) > found.scales[first], "the scale grows"
    assert found.rates[-1] == pytest.approx(1e-2 * 0.9 ** found.skips.count(False))


def test_clipping_before_unscaling_trains_otherwise() -> None:
    (theirs, wrong), (ours, found) = by_hand(clip_before_unscale=True), by_step()
    first = found.skips.index(False)
    assert wrong.losses[: first + 1] == found.losses[: first + 1]
    assert wrong.norms[first] > 100 * found.norms[first], "it clips the scaled gradients"
    assert not same(weights(ours), weights(theirs))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_inverted_scheduler_test_gives_other_rates() -> None:
    (_, wrong), (_, found) = by_hand(inverted_scheduler=True), by_step()
    assert wrong.rates != found.rates
    assert wrong.rates[-1] == pytest.approx(1e-2 * 0.9 ** found.skips.count(True)), "it counts the skipped steps"


def test_accumulated_calls_are_those_of_a_correct_loop() -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    theirs, ours = gpt2(), gpt2()
    optimizer, scaler = optimizer_of(theirs), torch.amp.GradScaler("cpu", init_scale=OVERFLOWING)
    torch.manual_seed(7)
    scales, norms = [], []
    for number, batch in enumerate(BATCHES):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = theirs(**batch).loss / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).item())
            scaler.step(optimizer)
            scales.append(scaler.get_scale())
            scaler.update()
            optimizer.zero_grad()

    scaler = torch.amp.GradScaler("cpu", init_scale=OVERFLOWING)
    step = TrainStep(ours, optimizer_of(ours), accumulate=2, scaler=scaler, autocast=torch.float16)
    torch.manual_seed(7)
    results = [step(batch) for batch in BATCHES]
    assert [result.complete for result in results] == [False, True] * 8
    assert [float(result.scale) for result in results if result.complete] == scales
    found = [float(result.grad_norm) for result in results if result.grad_norm is not None]
    assert [n for n in found if math.isfinite(n)] == [n for n in norms if math.isfinite(n)]
    assert same(weights(ours), weights(theirs))


def test_a_scaler_is_made_where_fp16_needs_one() -> None:
    model = gpt2()
    assert scaler_for(model, None) is None
    assert scaler_for(model, torch.bfloat16) is None
    made = scaler_for(model, torch.float16)
    assert made is not None
    assert made.is_enabled()


def test_a_disabled_scaler_is_none() -> None:
    model = regression()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    step = TrainStep(model, torch.optim.SGD(model.parameters()), scaler=scaler)
    assert not step.scaling.adapts
    assert float(step(pieces.points()).scale) == 1.0


def test_without_scaling_the_step_is_that_of_a_plain_loop() -> None:
    theirs, ours = gpt2(), gpt2()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    torch.manual_seed(7)
    for batch in BATCHES[:5]:
        theirs(**batch).loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    step = TrainStep(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    torch.manual_seed(7)
    found = record(step, BATCHES[:5])
    assert found.scales == [1.0] * 5
    assert same(weights(ours), weights(theirs))


@pytest.mark.parametrize("fused", [False, True])
def test_one_verdict_for_two_optimizers(fused: bool) -> None:
    """Where each decided alone, as with GradScaler by hand, the norm of NaN would carry one's NaN into the other."""
    model = regression()
    optimizers = [torch.optim.AdamW(part.parameters(), fused=fused) for part in (model.body, model.head)]
    step = TrainStep(model, optimizers, scaler=torch.amp.GradScaler("cpu"))
    step(pieces.points())
    before = weights(model)
    scale = float(step(pieces.points()).scale)
    between = weights(model)
    model.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    result = step(pieces.points())
    assert result.skipped
    assert not same(before, between)
    assert same(weights(model), between)
    assert float(step.scaling.current(step.device)) == scale / 2


def test_by_hand_one_optimizers_nan_reaches_the_other() -> None:
    model = regression()
    body, head = torch.optim.SGD(model.body.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    model.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    scaler.scale(model(*pieces.points())).backward()
    for optimizer in (body, head):
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in (body, head):
        scaler.step(optimizer)
    assert not bool(torch.isfinite(model.body[0].weight).all())


def test_an_error_between_leaves_the_scaler_usable() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaling = Scaling(scaler, torch.device("cpu"))
    for _ in range(2):
        scaling.scale(weight.sum()).backward()
        scaling.unscale([optimizer], torch.tensor(True))
        scaling.forget()
    assert scaler.get_scale() == 256.0


def test_an_ambient_autocast_in_fp16_needs_a_scaler() -> None:
    model = regression()
    step = TrainStep(model, torch.optim.SGD(model.parameters()))
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(ValueError, match=r"autocast=torch\.float16"):
        step(pieces.points())
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(pieces.points()).stepped
