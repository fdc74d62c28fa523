"""The Trainer of transformers with `MemoptCallback`: the same numbers within the budget, saved, killed and resumed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.models.families import VOCABULARY, bert, integers, t5
from memopt.integrations.transformers import MemoptCallback
from memopt.run.session import session_of
from tests.elsewhere import counted
from tests.integrations.training import BATCH, BUDGET_GB, EXACT, Run, assert_same, assert_within, gpt2, text, texts

pytest.importorskip("accelerate")

from transformers import (
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from tests.marks import slow

__all__ = ["counted"]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("counted")]
QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no",
    "per_device_train_batch_size": BATCH, "max_steps": 4, "seed": 1,
}  # fmt: skip


class Meter(TrainerCallback):
    """Measures the peak of each step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.block: Any = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.block = self.run.measured()
        self.block.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.block.__exit__(None, None, None)


class Killed(TrainerCallback):
    """Ends the training by an error in the middle, as a lost machine does."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of texts, padded to the longest."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([row["input_ids"] for row in rows], batch_first=True),
        "labels": pad([row["labels"] for row in rows], batch_first=True, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True),
    }


def trained(
    folder: Path,
    budget_gb: float | None,
    *,
    model: nn.Module | None = None,
    data: list[dict[str, Tensor]] | None = None,
    callbacks: tuple[TrainerCallback, ...] = (),
    resume: bool = False,
    options: dict[str, Any] = EXACT,
    **settings: Any,
) -> tuple[Run, list[dict[str, float]]]:
    """Train; return what happened and the Trainer's log."""
    run = Run()
    if budget_gb is not None:
        callbacks = (MemoptCallback(budget_gb, **options), *callbacks)
    model = gpt2() if model is None else model
    arguments = TrainingArguments(str(folder), **{**QUIET, **settings})
    trainer = Trainer(
        model,
        arguments,
        train_dataset=texts(64) if data is None else data,
        data_collator=collate,
        callbacks=[*callbacks, Meter(run)],
    )
    trainer.train(resume_from_checkpoint=resume)
    assert session_of(model) is None, "the model is not the plain one again"
    log = trainer.state.log_history
    run.losses = [figure for row in log if "loss" in row for figure in (row["loss"], row["grad_norm"])]
    return run.ended(model), log


@pytest.mark.slow
def test_token_weighted_accumulation_within_a_budget(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path, None, gradient_accumulation_steps=2)
    run, log = trained(tmp_path, BUDGET_GB, gradient_accumulation_steps=2)
    assert_same(run, plain)
    assert_within(run, BUDGET_GB, plain)
    plans = [row for row in log if "memopt_peak_gb" in row]
    assert [row["step"] for row in plans] == [1]
    assert plans[0]["memopt_peak_gb"] <= plans[0]["memopt_budget_gb"] <= BUDGET_GB


@pytest.mark.slow
def test_bert_with_dynamic_padding(tmp_path: Path) -> None:
    lengths = integers(57, 64, seed=5) + 40
    data = [text(row[:length]) for row, length in zip(integers(VOCABULARY, 64, 96), lengths, strict=True)]
    plain, _ = trained(tmp_path, None, model=bert(), data=data)
    run, log = trained(tmp_path, 0.031, model=bert(), data=data)
    assert_same(run, plain)
    assert any("memopt_peak_gb" in row for row in log), "all steps fit, the budget tests nothing"


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    plain, _ = trained(tmp_path / "plain", None)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, BUDGET_GB, callbacks=(Killed(),), **saving)
    resumed, _ = trained(tmp_path, BUDGET_GB, resume=True, **saving)
    assert_same(resumed, plain)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert Run().ended(saved).weights == plain.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing is off while"),
        slow({"torch_compile": True, "torch_compile_backend": "aot_eager"}, "torch_compile compiles only calls"),
        pytest.param({"bf16": True}, "", marks=pytest.mark.slow),
    ],
)
def test_settings_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    plain, _ = trained(tmp_path, None, **(settings if "bf16" in settings else {}))
    model = gpt2()
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("memopt"), "info", lambda text, *values: lines.append(text % values))
    run, log = trained(tmp_path, BUDGET_GB, model=model, **settings)
    assert said in "".join(lines)
    assert_same(run, plain)
    assert [row["step"] for row in log if "memopt_peak_gb" in row] == [1]
    assert model.is_gradient_checkpointing == settings.get("gradient_checkpointing", False)


@pytest.mark.slow
def test_generation_in_evaluation(tmp_path: Path) -> None:
    def evaluated(callbacks: list[TrainerCallback]) -> dict[str, float]:
        arguments = Seq2SeqTrainingArguments(
            str(tmp_path), predict_with_generate=True, generation_max_length=8, eval_strategy="steps", eval_steps=2,
            **QUIET,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row[:24]} for row in integers(VOCABULARY, 16, 48)]
        trainer = Seq2SeqTrainer(
            t5(),
            arguments,
            train_dataset=rows,
            eval_dataset=rows[:4],
            callbacks=callbacks,
            compute_metrics=lambda found: {"sum": float(found.predictions.sum())},
        )
        trainer.train()
        return {
            name: row[name] for row in trainer.state.log_history for name in ("eval_loss", "eval_sum") if name in row
        }

    assert evaluated([MemoptCallback(1, **EXACT)]) == evaluated([])


def test_wrong_options_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="did you mean 'precision'"):
        MemoptCallback(1, precison="fp32")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="positive"):
        MemoptCallback(0)


def test_a_training_that_fails_leaves_what_the_next_one_gives_back(tmp_path: Path) -> None:
    model = gpt2()
    model.gradient_checkpointing_enable()
    switched = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False)]
    callback = MemoptCallback(1, **EXACT)
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    arguments: Any = TrainingArguments(str(tmp_path), **QUIET)
    for _ in range(2):
        callback.on_train_begin(arguments, None, None, **parts)  # type: ignore[arg-type]
        assert session_of(model) is not None
        assert not any(one.gradient_checkpointing for one in switched)
    callback.end()
    assert session_of(model) is None
    assert switched
    assert all(one.gradient_checkpointing for one in switched)
