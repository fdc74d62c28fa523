"""Loops that hold a step's outputs through the next forward, in a process whose allocator may hold the budget alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt.errors import GIB
from tests.card.card import cap
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
SHAPE = 4, 512
LOGITS_BYTES = 4 * 512 * 50257 * 2


def job() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = GPT2Config(n_embd=256, n_layer=2, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0)
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config).train()
        tokens = torch.zeros(SHAPE, dtype=torch.int64)
    model.loss_type = "ForCausalLM"
    return model, {"input_ids": tokens, "labels": tokens}


def capped(share: float, **options: Any) -> tuple[nn.Module, dict[str, torch.Tensor], torch.optim.Optimizer]:
    """The job within a share of the plain step's peak, and the process within that budget."""
    model, batch = job()
    optimizer = torch.optim.AdamW(model.parameters())
    options |= {"optimizer": optimizer, "precision": "bf16", "backend": "aten"}
    budget_gb = share * memopt.plan(model, 1000.0, batch, **options).plain_peak_gb
    memopt.optimize(model, budget_gb, example_inputs=batch, **options)
    cap(budget_gb * GIB - memopt.plan_of(model).account.context)
    return model, batch, optimizer


@pytest.mark.parametrize(("outputs", "share"), [("loss", 0.95), ("all", 1.0)])
def test_logits_that_are_held_through_the_next_forward_are_planned_for(outputs: str, share: float) -> None:
    """Either the plan of the first forward has room for them, or another one is made."""
    model, batch, optimizer = capped(share, outputs=outputs)
    assert memopt.plan_of(model).account.elsewhere == 0
    rooms = []
    for _ in range(6):
        optimizer.zero_grad()
        out = model(**batch)
        plan = memopt.plan_of(model)
        rooms.append(plan.budget_bytes - plan.ceiling_bytes + plan.account.elsewhere)
        out.loss.backward()
        out.logits.argmax(-1)
        optimizer.step()
    assert min(rooms[1:]) >= LOGITS_BYTES


def test_logits_that_are_made_beside_the_activations_are_refused_before_the_backward() -> None:
    model, batch, _ = capped(0.6)
    out = model(**batch)
    out.logits.argmax(-1)
    with pytest.raises(memopt.BudgetError, match="appeared between the forward and its backward"):
        out.loss.backward()


def test_outputs_that_nobody_looked_at_are_nothing_when_they_are_held() -> None:
    model, batch, optimizer = capped(0.6)
    for _ in range(6):
        optimizer.zero_grad()
        out = model(**batch)
        assert memopt.plan_of(model).account.elsewhere == 0
        out.loss.backward()
        optimizer.step()
