"""A GPT-2 that is cut into the stages of a pipeline of `torch.distributed.pipelining`; for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from examples.models.families import library

VOCABULARY = 1_024


class Stage(nn.Module):
    """The blocks of a GPT-2 from one number to another, with the embeddings before the first and the head after the
    last one."""

    def __init__(self, model: Any, first: int, end: int) -> None:
        super().__init__()
        body = model.transformer
        self.tokens = body.wte if first == 0 else None
        self.positions = body.wpe if first == 0 else None
        self.blocks = nn.ModuleList(body.h[first:end])
        self.norm = body.ln_f if end == len(body.h) else None
        self.head = model.lm_head if end == len(body.h) else None

    def forward(self, value: Tensor) -> Tensor:
        """The logits, or what the next stage is given, of tokens or of what the stage before returned."""
        if self.tokens is not None and self.positions is not None:
            value = self.tokens(value) + self.positions(torch.arange(value.shape[1]))
        for block in self.blocks:
            found = block(value)
            value = found[0] if isinstance(found, tuple) else found
        if self.norm is not None and self.head is not None:
            value = self.head(self.norm(value))
        return value


def stage_modules(rank: int, ranks: int, per_rank: int, *, width: int, layers: int, length: int) -> dict[int, Stage]:
    """The stages of a rank by their numbers, each with as many of the model's blocks: the same on every run."""
    torch.manual_seed(0)
    model = library(
        "GPT2", "GPT2LMHeadModel", "ForCausalLM",
        vocab_size=VOCABULARY, n_positions=length, n_embd=width, n_layer=layers, n_head=width // 64, use_cache=False,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )()  # fmt: skip
    stages = ranks * per_rank
    cuts = [layers * number // stages for number in range(stages + 1)]
    return {number: Stage(model, cuts[number], cuts[number + 1]).train() for number in range(rank, stages, ranks)}


def pipeline_stages(modules: dict[int, Stage], stages: int) -> list[PipelineStage]:
    """Those modules as stages of a pipeline on the CPU."""
    return [PipelineStage(module, number, stages, torch.device("cpu")) for number, module in modules.items()]


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross entropy of each token's prediction of itself: tokens are shifted where batches are made."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
