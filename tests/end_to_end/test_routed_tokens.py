"""Experts behind a graph break: how many tokens each gets, and which of them get any, changes with every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memopt
from memopt.account.account import distinct_bytes
from memopt.errors import GIB
from memopt.run.session import session_of

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}


def mixtral(experts: int = 4) -> nn.Module:
    """Mixtral with the loop over experts that transformers runs in eager mode."""
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=experts, num_experts_per_tok=2, attn_implementation="eager",
        experts_implementation="eager", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).train()


def batches(steps: int, *, lengths: tuple[int, int] = (32, 32), samples: int = 4) -> Iterator[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(3)
    for _ in range(steps):
        length = int(torch.randint(lengths[0], lengths[1] + 1, (), generator=draws))
        ids = torch.randint(0, 256, (samples, length), generator=draws)
        yield {"input_ids": ids, "labels": ids}


def train(model: nn.Module, steps: Iterator[dict[str, torch.Tensor]]) -> tuple[list[float], int]:
    """Train a model; returns the losses and the most bytes that a step held."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, most = [], 0
    for batch in steps:
        state = [value for one in optimizer.state.values() for value in one.values() if value.dim()]
        held = distinct_bytes([*model.parameters(), *model.buffers(), *state, *batch.values()])
        with memopt.measure_peak("cpu") as peak:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
            del loss
            optimizer.step()
            optimizer.zero_grad()
        most = max(most, peak.allocated_bytes + held)
    return losses, most


def plans(model: nn.Module) -> int:
    call = session_of(model)
    assert call is not None
    return call.forward.road.plans


def regions_recorded(model: nn.Module) -> int:
    call = session_of(model)
    assert call is not None
    ways = [ways for _, ways in call.forward.recorded.broken.paths.paths.items()]
    return len({run.region for one in ways for captured in one.calls for run in captured.runs})


@pytest.mark.plans_always
@pytest.mark.parametrize("lengths", [(32, 32), (24, 48)])
@pytest.mark.slow
def test_routed_tokens_train_bit_by_bit_and_are_seldom_planned(lengths: tuple[int, int]) -> None:
    plain, model = mixtral(), mixtral()
    expected, _ = train(plain, batches(16, lengths=lengths))
    budget_gb = 1.3 * memopt.plan(mixtral(), 1, next(batches(1, lengths=(lengths[1],) * 2)), **EXACT).plain_peak_gb
    memopt.optimize(model, budget_gb, **EXACT)
    losses, most = train(model, batches(16, lengths=lengths))
    assert losses == expected
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert most <= budget_gb * GIB
    assert plans(model) <= 6
    assert regions_recorded(model) <= 32
