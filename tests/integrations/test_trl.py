"""TRL's trainers with the same `MemoptCallback`: the same numbers within the budget, in TRL's own bf16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.models.families import DECODER, integers, library
from tests.elsewhere import counted
from tests.integrations.training import EXACT, Run, assert_same

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from memopt.integrations.transformers import MemoptCallback
from tests.integrations.test_transformers import QUIET, Meter

__all__ = ["counted"]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("counted"), pytest.mark.slow]
SPECIAL = ("<unk>", "<pad>", "<bos>", "<eos>")
llama = library(
    "Llama", "LlamaForCausalLM", intermediate_size=704, **{**DECODER, "hidden_size": 256, "pad_token_id": 1}
)  # fmt: skip


def words(count: int, length: int, seed: int) -> list[str]:
    rows = integers(DECODER["vocab_size"] - len(SPECIAL), count, length, seed=seed)
    return [" ".join(f"w{number}" for number in row) for row in rows.tolist()]


def dataset(**columns: list[str]) -> Dataset:
    def rows() -> Iterator[dict[str, str]]:
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    return Dataset.from_generator(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = [*SPECIAL, *(f"w{number}" for number in range(DECODER["vocab_size"] - len(SPECIAL)))]
    inner = Tokenizer(models.WordLevel(dict(zip(vocabulary, range(len(vocabulary)), strict=True)), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def trained(kind: str, folder: Path, budget_gb: float | None) -> Run:
    run, model = Run(), llama()
    callbacks: list[Any] = [Meter(run)]
    if budget_gb is not None:
        callbacks.insert(0, MemoptCallback(budget_gb, **EXACT))
    given: dict[str, Any] = {"processing_class": tokenizer(), "callbacks": callbacks}
    settings = {**QUIET, "gradient_accumulation_steps": 2, "max_steps": 3}
    trainer: Any
    if kind == "sft":
        data = dataset(text=words(32, 110, 1))
        trainer = SFTTrainer(model, SFTConfig(str(folder), **settings), train_dataset=data, **given)
    else:
        data = dataset(prompt=words(32, 20, 1), chosen=words(32, 40, 2), rejected=words(32, 40, 3))
        config = DPOConfig(str(folder), **settings)
        trainer = DPOTrainer(model, copy.deepcopy(model), config, train_dataset=data, **given)
    trainer.train()
    log = trainer.state.log_history
    run.losses = [figure for row in log if "loss" in row for figure in (row["loss"], row["grad_norm"])]
    assert any("memopt_peak_gb" in row for row in log) == (budget_gb is not None)
    return run.ended(model)


@pytest.mark.parametrize(("kind", "budget_gb"), [("sft", 0.12), ("dpo", 0.12)])
def test_within_a_budget(kind: str, budget_gb: float, tmp_path: Path) -> None:
    plain, run = trained(kind, tmp_path, None), trained(kind, tmp_path, budget_gb)
    assert_same(run, plain)
    assert max(run.peaks_gb[1:]) <= budget_gb
