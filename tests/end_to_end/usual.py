"""The usual small models of the situation tests, their batch, and budgets that are tight for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from examples.models.families import integers, library, normals
from tests.end_to_end import odd_models
from tests.end_to_end.odd_models import CLASSES, ROWS, WIDTH, Layered
from tests.end_to_end.pieces import GIB, Piece, plan, run, step


class Dropping(Layered):
    """Blocks with dropout: recomputing it with other random numbers would show in every gradient."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.1)
        return x


class Blocks(odd_models.BreakInLoop):
    """Blocks that are captured one by one where the loop over them breaks."""

    body = Layered.body


def make(kind: type[nn.Module] = Dropping) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().train()


def gpt2(attention: str = "sdpa") -> nn.Module:
    """A GPT-2 of two layers for `causal_batch`."""
    return library(
        "GPT2", "GPT2LMHeadModel", "ForCausalLM", attn_implementation=attention,
        vocab_size=1024, n_positions=160, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )()  # fmt: skip


@dataclass(frozen=True)
class Usual:
    """Budgets for a model of `kind` and the usual batch, in GB."""

    kind: type[nn.Module]

    @cached_property
    def plan(self) -> memopt.Plan:
        x, labels = batch()
        return plan(make(self.kind), {"x": x} if self.kind is odd_models.Logits else {"x": x, "labels": labels})

    @cached_property
    def tight(self) -> float:
        """Half-way between the smallest budget that works and the plain step's peak."""
        assert self.smallest < 0.95 * self.plan.plain_peak_gb, "the test needs a model that recomputation helps"
        return (self.smallest + self.plan.plain_peak_gb) / 2

    @cached_property
    def smallest(self) -> float:
        return self.plan.smallest_gb()

    @property
    def gradients(self) -> float:
        return self.plan.account.gradients / GIB


@cache
def usual(kind: type[nn.Module] = Dropping) -> Usual:
    return Usual(kind)


def batch(rows: int = ROWS, seed: int = 2) -> tuple[Tensor, Tensor]:
    return normals(rows, WIDTH, seed=seed), integers(CLASSES, rows)


def steps(model: nn.Module, *batches: Any) -> list[Tensor]:
    return [step(model, inputs) for inputs in batches]


def refusal(model: nn.Module, piece: Piece, budget_gb: float, batch: Any) -> memopt.BudgetError:
    """Assert that a piece of training is refused and holds no more than the budget; return the error."""
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp32", allow={"recompute"})
    refused: list[memopt.BudgetError] = []

    def attempt(model: nn.Module) -> None:
        with pytest.raises(memopt.BudgetError) as caught:
            piece(model)
        refused.append(caught.value.with_traceback(None))

    trained = run(model, attempt, batch)
    assert trained.peak_bytes <= budget_gb * GIB
    return refused[0]
