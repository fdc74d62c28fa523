"""TRL's head, which computes log-probabilities tile by tile in a backward of its own, in one region with the layers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import memopt
from examples.models.families import DECODER, integers, library

pytest.importorskip("trl")

from trl.kernels import chunked_logprob
from trl.trainer import utils
from trl.trainer.utils import add_fused_lm_head

from tests.marks import slow

pytestmark = pytest.mark.filterwarnings("ignore")
llama = library("Llama", "LlamaForCausalLM", intermediate_size=256, **DECODER)
TOKENS = integers(DECODER["vocab_size"], 8, 64)


def step(model: Any) -> list[Tensor]:
    """The loss and the gradients of a step as SFTTrainer takes it."""
    outputs = model(input_ids=TOKENS, labels=TOKENS, fused_lm_head=True)
    loss = -outputs.log_probs.sum() / outputs.label_mask.sum()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *gradients]


def measured(model: Any) -> tuple[list[Tensor], float]:
    """A second step, and its peak in GB."""
    step(model)
    gc.collect()
    with memopt.measure_peak("cpu") as peak:
        found = step(model)
    return found, peak.gb


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "tokens", "share"), [slow(32_768, 4_096, 0.5), slow(600, 4_096, 0.9), (600, 200, 0.9)]
)
def test_below_the_plain_peak(words: int, tokens: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile, wider than the vocabulary as TRL has it; two tiles of words; and these for each of three of tokens."""
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", words)
    monkeypatch.setattr(chunked_logprob, "TOKEN_CHUNK_SIZE", tokens)
    model: Any = llama()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    plain, plain_gb = measured(model)
    budget_gb = share * plain_gb
    memopt.optimize(model, budget_gb, precision="fp32", outputs="all", allow={"recompute", "reinplace"})
    found, peak_gb = measured(model)
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))
    assert peak_gb <= budget_gb
    assert not any("captured in" in note for note in memopt.plan_of(model).notes)
