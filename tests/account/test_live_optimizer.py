"""The account of a class of optimisers, where an optimiser of this class is there already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn, optim

from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import LiveOptimizer, live_optimizer_of
from memopt.meter import measure_peak


def qwen3() -> nn.Module:
    """A language model whose head follows a norm, and in groups by weight decay, a matrix."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=3000, hidden_size=64, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16,
        )
    )  # fmt: skip


def by_decay(model: nn.Module, **options: Any) -> optim.Optimizer:
    """AdamW with weight decay of the matrices alone, as the Trainer of transformers makes it."""
    groups = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    return optim.AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], **options)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["for-loop", "fused"])
def test_temporaries_are_those_of_the_groups_and_kernels_that_are_there(options: dict[str, Any]) -> None:
    model = qwen3()
    optimizer = by_decay(model, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with measure_peak("cpu") as peak:
        optimizer.step()
    live = LiveOptimizer.of(optimizer)
    account = optimizer_account(live.like(optim.AdamW), live.in_order(model.parameters()))
    assert peak.allocated_bytes <= account.step_temporary_bytes <= 1.01 * peak.allocated_bytes + 256
    alone = optimizer_account(optim.AdamW, model.parameters()).step_temporary_bytes
    assert alone < peak.allocated_bytes or options


def test_the_only_one_of_the_class_counts() -> None:
    model = qwen3()
    adam, other, sgd = map(LiveOptimizer.of, (by_decay(model), by_decay(model), optim.SGD(model.parameters())))
    assert live_optimizer_of(optim.AdamW, (adam, sgd)) is adam
    assert live_optimizer_of("AdamW", (sgd, adam)) is adam
    assert live_optimizer_of(optim.AdamW, (adam, other)) is None
    assert live_optimizer_of(optim.Adam, (adam, sgd)) is None
    assert live_optimizer_of(by_decay(model), (adam,)) is None
    assert live_optimizer_of(None, (adam,)) is None


def test_what_differs_from_the_class_is_said_by_numbers() -> None:
    model = qwen3()
    assert LiveOptimizer.of(optim.AdamW(model.parameters())).departure(model.parameters()) == ""
    assert LiveOptimizer.of(optim.AdamW(model.parameters(), fused=True)).departure(model.parameters()) == "fused "
    grouped = [LiveOptimizer.of(by_decay(one)).departure(one.parameters()) for one in (model, qwen3())]
    assert grouped[0] == grouped[1] != ""
