"""The Trainer of transformers and TRL's SFTTrainer under DDP, by the number of the rank and the part of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from examples.models.ddp import VOCABULARY
from examples.models.families import DECODER, integers, library
from memopt.integrations.transformers import MemoptCallback
from tests.integrations.parts import LENGTH, SAVED_AT, STEPS, TEXTS, Part, gpt2
from tests.integrations.test_transformers import QUIET, collate
from tests.integrations.test_trl import dataset, tokenizer, words
from tests.integrations.training import EXACT, Run, text

Data = list[dict[str, Any]]
RANKS = 2
bert = library(
    "Bert", "BertForMaskedLM", vocab_size=VOCABULARY, hidden_size=320, intermediate_size=1280, num_hidden_layers=4,
    num_attention_heads=4, max_position_embeddings=LENGTH,
)  # fmt: skip
llama = library(
    "Llama", "LlamaForCausalLM", intermediate_size=1056, **{**DECODER, "hidden_size": 384, "pad_token_id": 1}
)  # fmt: skip


class InParts(TrainerCallback):
    """Measures steps and is killed, as the part has it."""

    def __init__(self, rank: int, part: Part, run: Run) -> None:
        self.rank, self.part, self.run = rank, part, run
        self.block: Any = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin a step."""
        self.part.perhaps_killed(state.global_step, self.rank, losses_in(state))
        self.block = self.run.measured()
        self.block.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End a step."""
        self.block.__exit__(None, None, None)


def losses_in(state: TrainerState) -> list[float]:
    """The losses in the Trainer's log."""
    return [row["loss"] for row in state.log_history if "loss" in row]


def settings(part: Part, texts: int = TEXTS) -> dict[str, Any]:
    """The arguments of a part, saved by the Trainer itself."""
    return {
        **QUIET, "output_dir": str(part.folder / "trained"), "ddp_backend": "gloo", "max_steps": STEPS,
        "per_device_train_batch_size": texts, "save_strategy": "steps" if part.killed else "no",
        "save_steps": SAVED_AT,
    }  # fmt: skip


def trained(trainer: Any, run: Run, part: Part, model: nn.Module) -> Run:
    """Train the part."""
    if part.budget_gb is not None:
        trainer.callback_handler.callbacks.insert(0, MemoptCallback(part.budget_gb, **EXACT))
    trainer.train(resume_from_checkpoint=part.resumed)
    run.losses = losses_in(trainer.state)[part.first :]
    return part.ended(run, model)


def by_trainer(rank: int, part: Part, make: Callable[[], nn.Module], data: Data) -> Run:
    """The stock Trainer."""
    run, model = Run(), make()
    trainer = Trainer(
        model,
        TrainingArguments(**settings(part)),
        train_dataset=data,  # type: ignore[arg-type]
        data_collator=collate,
        callbacks=[InParts(rank, part, run)],
    )
    return trained(trainer, run, part, model)


def gpt2_by_trainer(rank: int, part: Part) -> Run:
    """A GPT-2 on texts of one length."""
    return by_trainer(rank, part, gpt2, [text(row) for row in integers(VOCABULARY, STEPS * RANKS * TEXTS, LENGTH)])


def bert_by_trainer(rank: int, part: Part) -> Run:
    """A BERT on texts of many lengths, padded to the longest of each rank's batch."""
    count = STEPS * RANKS * TEXTS
    lengths = integers(LENGTH // 2, count, seed=5) + LENGTH // 2
    rows = zip(integers(VOCABULARY, count, LENGTH), lengths, strict=True)
    return by_trainer(rank, part, bert, [text(row[:length]) for row, length in rows])


def llama_by_sft(rank: int, part: Part) -> Run:
    """A Llama by TRL's SFTTrainer."""
    run, model, texts = Run(), llama(), 3 * TEXTS
    trainer = SFTTrainer(
        model,
        SFTConfig(**settings(part, texts)),
        train_dataset=dataset(text=words(STEPS * RANKS * texts, LENGTH, 1)),
        processing_class=tokenizer(),
        callbacks=[InParts(rank, part, run)],
    )
    return trained(trainer, run, part, model)
