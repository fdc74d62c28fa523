"""Input-gradient hooks, which PEFT adds for gradient checkpointing: the step is one region, bitwise and within its
budget."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from examples.models.adapters import with_adapters
from examples.models.families import integers
from tests.end_to_end.pieces import check, step, tight

pytestmark = pytest.mark.plans_always  # the plain steps would fit

TOKENS, VOCABULARY = 32, 96


def adapted(*, reentrant: bool = True) -> Any:
    """A small Llama with adapters and checkpoints."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        model = with_adapters(LlamaForCausalLM(config), rank=4, reentrant=reentrant)
    return model.train()


def batch() -> dict[str, Tensor]:
    tokens = integers(VOCABULARY, 8, TOKENS)
    return {"input_ids": tokens, "labels": tokens}


@cache
def budget() -> float:
    """A budget that is tight for the adapted model."""
    return tight(adapted(), batch())


@pytest.mark.slow
@pytest.mark.parametrize(("reentrant", "ahead"), [(True, False), (False, True)])
def test_adapters_with_checkpointing_are_one_region(reentrant: bool, ahead: bool) -> None:
    model = adapted(reentrant=reentrant)
    given = {"example_inputs": batch()} if ahead else {}
    check(model, lambda model: [step(model, batch()) for _ in range(2)], budget(), batch(), **given)
    plan = memopt.plan_of(model)
    assert len(plan.regions) == 1
    assert not [note for note in plan.notes if "outputs other than the loss" not in note]
    assert plan.added_time > 0


class Inspected(nn.Module):
    """Keeps or returns the value that its gradient is read from, which only a graph break gives it."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.table, self.layer, self.kept = nn.Embedding(8, 16).requires_grad_(False), nn.Linear(16, 16), kept
        self.seen: Tensor | None = None

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.table(tokens) * 2
        hidden.requires_grad_()
        loss = self.layer(hidden).pow(2).mean()
        if self.kept:
            self.seen = hidden
            return loss
        return loss, hidden


@pytest.mark.parametrize("kept", [True, False])
def test_a_value_whose_gradient_can_be_read_has_one(kept: bool) -> None:
    torch.manual_seed(0)
    model, tokens = Inspected(kept=kept).train(), integers(8, 4)

    def gradient() -> Tensor | None:
        result = model(tokens)
        loss, seen = (result, model.seen) if kept else result
        loss.backward()
        return seen.grad

    plain = gradient()
    memopt.optimize(model, 1.0, precision="fp32", allow={"recompute"})
    planned = gradient()
    assert plain is not None
    assert planned is not None
    assert torch.equal(planned, plain)
