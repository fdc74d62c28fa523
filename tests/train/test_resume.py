"""A run killed after any call, and resumed from its state dicts, is bitwise the run that was not."""

from __future__ import annotations

import copy
import io
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memopt import TrainStep
from tests.train import pieces
from tests.train.pieces import gpt2, regression, same, weights

CALLS = 9
BATCHES = [pieces.uneven_text(length=8, seed=seed) for seed in range(CALLS)]


def built() -> tuple[nn.Module, TrainStep]:
    """Dropout, two microbatches a call, two calls an effective batch, a scale that overflows and grows, two optimisers
    with a scheduler each."""
    model: Any = gpt2()
    blocks, rest = list(model.transformer.h.parameters()), list(model.transformer.wte.parameters())
    optimizers = [torch.optim.AdamW(blocks, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 1e-2, total_steps=20),
        torch.optim.lr_scheduler.LambdaLR(optimizers[1], lambda step: 0.9**step),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=1)
    step = TrainStep(
        model, optimizers, 1.0, schedulers, accumulate=2, scaler=scaler, microbatches=2, autocast=torch.float16
    )
    return model, step


def saved(model: nn.Module, step: TrainStep) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": step.state_dict()}, file)
    return file.getvalue()


def resumed(file: bytes) -> tuple[nn.Module, TrainStep]:
    """From other random states, as in a new process."""
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    model, step = built()
    state = torch.load(io.BytesIO(file), weights_only=True)
    model.load_state_dict(state["model"])
    step.load_state_dict(state["step"])
    return model, step


def observed(model: nn.Module, step: TrainStep, batch: Any) -> tuple[Any, list[Tensor]]:
    """All that a call shows and leaves, and what was drawn after it."""
    result = step(batch)
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in step.optimizers]
    norm = None if result.grad_norm is None else repr(float(result.grad_norm))
    numbers = (float(result.loss), norm, float(result.scale), result.skipped, rates, step.number, drawn)
    return numbers, weights(model)


def test_killed_after_any_call() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    model, step = built()
    states, expected = [saved(model, step)], []
    for batch in BATCHES:
        expected.append(observed(model, step, batch))
        states.append(saved(model, step))
    skips = [numbers[3] for numbers, _ in expected if numbers[1] is not None]
    assert skips == [True, False, True, False]
    assert len({tuple(numbers[4]) for numbers, _ in expected}) == 3, "the rates change with each step"
    assert step.number == CALLS // 2
    assert CALLS % 2, "the last state is within an effective batch"
    for call, state in enumerate(states):
        model, step = resumed(state)
        for batch, (numbers, parameters) in zip(BATCHES[call:], expected[call:], strict=True):
            found, ours = observed(model, step, batch)
            assert found == numbers, f"killed after call {call}"
            assert same(ours, parameters), f"killed after call {call}"


def test_a_guarded_step_resumes_with_uneven_counts() -> None:
    """Without a scaler; the reference of the effective batch is part of the state."""

    def new() -> tuple[nn.Module, TrainStep]:
        model = gpt2()
        return model, TrainStep(model, torch.optim.AdamW(model.parameters()), accumulate=3)

    model, step = new()
    torch.manual_seed(1)
    step([pieces.uneven_text(2, seed=1)])
    step([pieces.uneven_text(3, seed=2), pieces.uneven_text(4, seed=3)])
    state = copy.deepcopy({"model": model.state_dict(), "step": step.state_dict()})
    loss = step(pieces.text(seed=4)).loss
    other, again = new()
    other.load_state_dict(state["model"])
    again.load_state_dict(state["step"])
    assert torch.equal(again(pieces.text(seed=4)).loss, loss)
    assert same(weights(other), weights(model))
    assert math.isfinite(loss)


def test_loading_leaves_the_saved_gradients_alone() -> None:
    model = regression()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), accumulate=3)
    step(pieces.points())
    state = copy.deepcopy(step.state_dict())
    kept = [gradient.clone() for gradient in state["gradients"]]
    for _ in range(2):
        step.load_state_dict(state)
        step(pieces.points())
    assert same(state["gradients"], kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": 2}, "accumulate=2"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "without a GradScaler"),
        ({"scheduler": True}, "0 schedulers, this TrainStep 1"),
        ({"split": True}, "1 optimizers, this TrainStep 2"),
        ({"frozen": True}, "other parameters"),
    ],
)
def test_a_state_of_another_step_changes_nothing(change: dict[str, Any], message: str) -> None:
    model = regression()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulate=3)
    step(pieces.points())
    state = step.state_dict()

    other: Any = regression()
    optimizers: Any = torch.optim.SGD(other.body.parameters() if change.pop("frozen", False) else other.parameters())
    if change.pop("split", False):
        optimizers = [torch.optim.SGD(other.body.parameters()), torch.optim.SGD(other.head.parameters())]
    if change.pop("scheduler", False):
        change["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizers)
    refusing = TrainStep(other, optimizers, **{"accumulate": 3, **change})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rate = refusing.optimizers[0].param_groups[0]["lr"]
    with pytest.raises(ValueError, match=message):
        refusing.load_state_dict(state)
    assert refusing.optimizers[0].param_groups[0]["lr"] == rate
    assert all(parameter.grad is None for parameter in other.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_no_state_is_refused() -> None:
    model = regression()
    step = TrainStep(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="gradients, number, optimizers"):
        step.load_state_dict(
            {"generators": {}, "schedulers": [], "accumulate": 1, "effective_batch": {}, "scaler": None}
        )


@pytest.mark.parametrize(
    "change",
    [
        {"optimizers": [{"state": {}, "param_groups": []}]},
        {"optimizers": [7]},
        {"optimizers": 7},
        {"effective_batch": {}},
        {"gradients": [1, 2]},
        {"generators": {"torch": torch.zeros(3)}},
        {"number": None, "generators": None},
    ],
)
def test_a_damaged_state_is_refused_and_leaves_the_step_as_it_was(change: dict[str, Any]) -> None:
    model = regression()
    step = TrainStep(model, torch.optim.Adam(model.parameters(), lr=0.5), accumulate=2)
    for _ in range(3):
        step(pieces.points())
    state = copy.deepcopy(step.state_dict())
    held = [parameter.grad for parameter in model.parameters()]
    damaged = copy.deepcopy(state) | change
    with pytest.raises(ValueError, match="no state of a TrainStep, or it is damaged"):
        step.load_state_dict(damaged)
    assert step.number == state["number"]
    assert step.effective_batch.calls == state["effective_batch"]["calls"]
    for parameter, gradient in zip(model.parameters(), held, strict=True):
        assert parameter.grad is gradient
    now = step.state_dict()
    assert same(now["gradients"], state["gradients"])
    for number, saved in state["optimizers"][0]["state"].items():
        assert same(list(now["optimizers"][0]["state"][number].values()), list(saved.values()))


@pytest.mark.parametrize("state", [None, 7, [], "state"])
def test_what_is_no_mapping_is_refused(state: Any) -> None:
    model = regression()
    with pytest.raises(ValueError, match="no state of a TrainStep"):
        TrainStep(model, torch.optim.SGD(model.parameters())).load_state_dict(state)
