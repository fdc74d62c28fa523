"""What lies on the card beside a step, as torch's allocator counts it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import memopt
from memopt.account.account import BOOKKEEPING_BYTES
from memopt.account.elsewhere import Around, look
from tests.card.card import without_values
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
MB = 1024**2


def test_blocks_that_the_allocator_does_not_split_are_nothing_elsewhere() -> None:
    """The parameter takes the place of a tensor that was a little larger, and its block has the rest, too."""
    device = torch.device("cuda", 0)
    before = look(nn.Linear(1, 1, device=device), device, Around()).other
    larger = torch.empty(30 * MB, dtype=torch.uint8, device=device)
    del larger
    model = nn.Linear(1024, 30 * 256 - 100, bias=False, device=device)
    assert look(model, device, Around()).other - before <= BOOKKEEPING_BYTES


def test_inputs_that_the_caller_holds_are_nothing_elsewhere_in_the_backward() -> None:
    """Saved for the backward is a copy in 16 bits."""
    config = ViTConfig(num_hidden_layers=2, hidden_size=512, num_attention_heads=8, intermediate_size=2048)
    config.problem_type = "single_label_classification"
    with torch.device("cuda"), without_values():
        model = ViTForImageClassification(config).train()
        batch = {"pixel_values": torch.randn(128, 3, 224, 224), "labels": torch.zeros(128, dtype=torch.int64)}
    model.loss_type = "ForSequenceClassification"
    options = {"precision": "bf16", "backend": "aten"}
    budget_gb = memopt.plan(model, 100.0, batch, **options).plain_peak_gb
    memopt.optimize(model, budget_gb, example_inputs=batch, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert memopt.plan_of(model).account.elsewhere == 0
