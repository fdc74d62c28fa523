"""Training loops that reach the model otherwise than by calling it: they run as planned, or warn once with the mend."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from examples.models.families import integers, normals
from memopt.compat.hooks import watching_hooks
from memopt.emit.gradients import is_hooked
from memopt.run.session import Session
from tests.end_to_end.odd_models import CLASSES, ROWS, WIDTH, Layered
from tests.end_to_end.pieces import assert_same, run
from tests.end_to_end.usual import Dropping, make

pytestmark = pytest.mark.plans_always  # the plain steps would fit

BATCH = (normals(ROWS, WIDTH), integers(CLASSES, ROWS))


class Module(Dropping):
    """A model with the methods of a LightningModule, which its trainer calls in place of the model."""

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(self.body(batch[0]), batch[1])

    def forward_step(self, batch: Any) -> Tensor:
        return self.forward(*batch)

    def calling_step(self, batch: Any) -> Tensor:
        loss: Tensor = self(*batch)
        return loss


def optimized(model: nn.Module) -> nn.Module:
    return memopt.optimize(model, 1.0, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})


@contextmanager
def warnings_of_memopt() -> Iterator[list[str]]:
    """The texts of the warnings about unplanned backwards in the block, which name a line of this file."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield texts
    ours = [warning for warning in seen if "memopt" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in ours)
    texts += [str(warning.message) for warning in ours]


def train(loss: Callable[[], Tensor], model: nn.Module, steps: int = 3) -> None:
    for _ in range(steps):
        model.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]


def compiled(model: nn.Module, **options: Any) -> Callable[[], Tensor]:
    call = torch.compile(model, backend="aot_eager", **options)
    return lambda: call(*BATCH)


def calling(model: Any) -> Callable[[], Tensor]:
    return lambda: model.calling_step(BATCH)


@pytest.mark.parametrize("way", [compiled, calling])
def test_runs_as_planned(way: Callable[[nn.Module], Callable[[], Tensor]]) -> None:
    model, plain = make(Module), make(Module)
    loss = way(optimized(model))
    with warnings_of_memopt() as texts:
        trained = run(model, lambda model: train(loss, model), BATCH)
    assert not texts
    assert memopt.plan_of(model).regions
    assert_same(trained, run(plain, lambda model: train(lambda: model(*BATCH), model), BATCH))


def test_compiled_around_many_shapes_and_in_eval_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    monkeypatch.setattr(Session, "_by_plan", lambda *given: planned.append(len(given[2].call[0][0])))
    model = optimized(make(Layered))
    call = torch.compile(model, backend="aot_eager")
    with warnings_of_memopt() as texts:
        for rows in range(2, 14):
            call(BATCH[0][:rows], BATCH[1][:rows])
        assert planned == list(range(2, 14))
        model.eval()
        with torch.no_grad():
            assert torch.equal(call(*BATCH), model(*BATCH))
    assert not texts


def test_the_plan_of_a_model_inside_torch_compile() -> None:
    model = optimized(make(Layered))
    train(lambda: model(*BATCH), model)
    around: Any = torch.compile(model, backend="aot_eager")
    assert memopt.plan_of(around) is memopt.plan_of(model)
    plain: Any = torch.compile(make(Layered), backend="aot_eager")
    with pytest.raises(ValueError, match="is not optimised"):
        memopt.plan_of(plain)


@pytest.mark.slow
def test_trainer_with_torch_compile() -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    model: Any = optimized(GPT2LMHeadModel(config))
    tokens = integers(64, 16)
    arguments = TrainingArguments(
        "/tmp/unused", torch_compile=True, torch_compile_backend="aot_eager", max_steps=2, report_to="none",
        per_device_train_batch_size=4, save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    with warnings_of_memopt() as texts:
        Trainer(model, arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8).train()
    assert not texts
    assert memopt.plan_of(model).regions


def by_forward(model: Any) -> Callable[[], Tensor]:
    return lambda: model.forward(*BATCH)


def by_a_training_step(model: Any) -> Callable[[], Tensor]:
    return lambda: model.training_step(BATCH)


def by_a_step_of_forward(model: Any) -> Callable[[], Tensor]:
    return lambda: model.forward_step(BATCH)


def in_a_compiled_function(model: nn.Module) -> Callable[[], Tensor]:
    call = torch.compile(lambda *batch: model(*batch) * 2, backend="aot_eager")
    return lambda: call(*BATCH)


def by_compile_in_place(model: nn.Module) -> Callable[[], Tensor]:
    model.compile(backend="aot_eager")
    return lambda: model(*BATCH)


def in_eval_mode(model: nn.Module) -> Callable[[], Tensor]:
    model.eval()
    return lambda: model(*BATCH)


@pytest.mark.parametrize(
    ("way", "mend"),
    [
        (by_forward, "call the model itself"),
        (by_a_training_step, "optimise the submodule that is called"),
        (by_a_step_of_forward, "call the model itself"),
        (in_a_compiled_function, "compile nothing around the model's call"),
        (by_compile_in_place, "call optimize after compile()"),
        (in_eval_mode, "call train() on it"),
    ],
)
def test_warns_once_with_the_mend(way: Callable[[nn.Module], Callable[[], Tensor]], mend: str) -> None:
    model, plain = optimized(make(Module)), make(Module)
    loss, expected = way(model), way(plain)
    with warnings_of_memopt() as texts:
        trained = run(model, lambda model: train(loss, model), BATCH)
    assert len(texts) == 1
    assert mend in texts[0]
    assert_same(trained, run(plain, lambda model: train(expected, model), BATCH))


def test_eval_mode_is_noticed_after_planned_steps_too() -> None:
    model = optimized(make())
    with warnings_of_memopt() as texts:
        train(lambda: model(*BATCH), model)
        model.eval()
        model(*BATCH)  # a validation without no_grad
        model.train()
        train(lambda: model(*BATCH), model)
        assert not texts
        model.eval()
        train(lambda: model(*BATCH), model)
    assert len(texts) == 1


@pytest.mark.parametrize("compiled_between", [False, True])
def test_a_model_that_is_given_back_is_not_watched(compiled_between: bool) -> None:
    model = optimized(make())
    if compiled_between:
        model.compile(backend="aot_eager")
    memopt.remove(model)
    with warnings_of_memopt() as texts:
        train(lambda: model(*BATCH), model)
    assert not texts


def test_plans_do_not_take_the_watch_for_a_hook() -> None:
    model = optimized(make())
    assert all(map(watching_hooks, model.parameters()))
    assert not any(map(is_hooked, model.parameters()))
    assert not any(map(watching_hooks, copy.deepcopy(model).parameters()))
    train(lambda: model(*BATCH), model, steps=1)
    assert not any(map(watching_hooks, model.parameters()))
