"""Small models, batches and hand-written loops for the tests of the training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from examples.models.families import integers, library, normals, seeded
from memopt import TrainStep

Batch = dict[str, Tensor]
VOCABULARY = 61
WIDTH = 32
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 32,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}

gpt2 = library("GPT2", "GPT2LMHeadModel", "ForCausalLM", **GPT2)
gpt2_without_dropout = library(
    "GPT2", "GPT2LMHeadModel", "ForCausalLM", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **GPT2
)
bert_without_dropout = library(
    "Bert", "BertForMaskedLM",
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
t5_without_dropout = library(
    "T5", "T5ForConditionalGeneration",
    vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
    decoder_start_token_id=0, use_cache=False,
)  # fmt: skip


def text(samples: int = 4, length: int = 16, seed: int = 1) -> Batch:
    tokens = integers(VOCABULARY, samples, length, seed=seed)
    return {"input_ids": tokens, "labels": tokens}


def uneven_text(samples: int = 4, length: int = 16, seed: int = 1) -> Batch:
    """The first sample has no valid label, the next three, the next six more, and so on."""
    batch = text(samples, length, seed)
    valid = torch.tensor([min(3 * number, length) for number in range(samples)])
    beyond = torch.arange(length).expand(samples, -1) >= valid[:, None]
    return {**batch, "labels": batch["labels"].masked_fill(beyond, -100)}


class Regression(nn.Module):
    """Returns its loss; two parts, for two optimisers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(self.body(x)).squeeze(-1), y)


regression = seeded(Regression)


def points(samples: int = 8, seed: int = 2) -> tuple[Tensor, Tensor]:
    return normals(samples, WIDTH, seed=seed), normals(samples, seed=seed + 100)


@dataclass
class Record:
    """The figures of a run, call by call, as Python numbers."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skips: list[bool] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def record(step: TrainStep, batches: Iterable[Any]) -> Record:
    found = Record()
    for batch in batches:
        result = step(batch)
        assert result.grad_norm is not None
        found.losses.append(float(result.loss))
        found.scales.append(float(result.scale))
        found.norms.append(float(result.grad_norm))
        found.skips.append(result.skipped)
        found.rates.append(step.optimizers[0].param_groups[0]["lr"])
    return found


def hand_written(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    scaler: torch.amp.GradScaler,
    batches: Iterable[Batch],
    *,
    clip_before_unscale: bool = False,
    inverted_scheduler: bool = False,
) -> Record:
    """The loop of torch's AMP documentation in fp16, with its scheduler stepped if no step was skipped; the flags make
    a mistake of the tutorials each."""
    found = Record()
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        if not clip_before_unscale:
            scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        skipped = scaler.get_scale() < scale
        if skipped == inverted_scheduler:
            scheduler.step()
        found.losses.append(loss.item())
        found.scales.append(scale)
        found.norms.append(norm.item())
        found.skips.append(skipped)
        found.rates.append(optimizer.param_groups[0]["lr"])
    return found


def gradients_of(step: TrainStep, run: Callable[[], Any]) -> list[Tensor]:
    """The gradients, unclipped if the step does not clip, that `run` has its first optimiser step with."""
    seen: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    handle = step.optimizers[0].register_step_pre_hook(keep)
    run()
    handle.remove()
    return seen


def plain_gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, as a part of the largest value of all."""
    assert len(found) == len(expected)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / largest


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))
