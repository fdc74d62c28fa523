"""Large inputs of a call on a card: they are no bytes elsewhere, neither in the forward nor in the backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification
from transformers.initialization import no_init_weights

import memopt


def test_the_inputs_of_a_forward_belong_to_its_backward_too() -> None:
    config = ViTConfig(num_hidden_layers=4, hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
    with torch.device("cuda"), no_init_weights():  # drawing its weights reads values
        model = ViTForImageClassification(config).train()
        batch = {"pixel_values": torch.zeros(64, 3, 224, 224), "labels": torch.zeros(64, dtype=torch.int64)}
    model.loss_type = "ForSequenceClassification"
    model.config.problem_type = "single_label_classification"
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"optimizer": optimizer, "precision": "bf16", "backend": "aten"}
    with pytest.raises(memopt.BudgetError) as refusal:
        memopt.plan(model, 0.001, batch, **options)
    memopt.optimize(model, refusal.value.smallest_gb, example_inputs=batch, **options)
    for _ in range(3):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
