"""The batch, and the length, that `max_batch` names is trained within the budget; the next one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt import BudgetError, TrainStep
from memopt.errors import GIB
from memopt.meter import measure_peak
from tests.smallest import smallest_gb

VOCABULARY = 1024


def make(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=256, n_embd=64, n_layer=2, n_head=2, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    with torch.device(device):
        model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def tokens(samples: int, length: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    drawn = torch.randint(0, VOCABULARY, (samples, length), device=device)
    return {"input_ids": drawn, "labels": drawn}


OPTIONS: dict[str, Any] = {"precision": "fp32", "optimizer": torch.optim.AdamW}
OPTIONS["allow"] = {"recompute"}  # without "microbatch", TrainStep refuses what does not fit whole


@pytest.mark.parametrize(
    ("find", "sized", "multiple"),
    [
        pytest.param(memopt.max_batch, lambda size, device="cpu": tokens(size, 48, device), 1, marks=pytest.mark.slow),
        pytest.param(memopt.max_length, lambda size, device="cpu": tokens(4, size, device), 16, marks=pytest.mark.slow),
    ],
)
def test_it_fits_and_the_next_does_not(
    find: Callable[..., int], sized: Callable[..., dict[str, torch.Tensor]], multiple: int
) -> None:
    budget_gb = 1.02 * smallest_gb(make(), sized(5 * multiple), **OPTIONS)
    found = find(
        make("meta"), budget_gb, lambda size: sized(size, "meta"), multiple_of=multiple, device="cpu", **OPTIONS
    )
    assert found >= 5 * multiple
    model = memopt.optimize(make(), budget_gb, **OPTIONS)
    step = TrainStep(model, torch.optim.AdamW(model.parameters()))
    batch = sized(found)
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), batch["input_ids"]])
    with measure_peak("cpu") as peak:
        step(batch)
        step(batch)
    assert peak.allocated_bytes + held <= budget_gb * GIB
    with pytest.raises(BudgetError):
        step(sized(found + multiple))
