"""A GPT-2 of 100 MB under `DistributedDataParallel`, plain and optimised before or after; for tests and benchmarks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memopt
from examples.models.families import library

VOCABULARY = 8_400
Order = Literal["before", "after"]


def gpt2_of(width: int, layers: int, heads: int, **config: Any) -> Callable[[], nn.Module]:
    """A function that makes a GPT-2 for texts of 64 tokens, with more of its configuration."""
    return library(
        "GPT2", "GPT2LMHeadModel", "ForCausalLM",
        vocab_size=VOCABULARY, n_positions=64, n_embd=width, n_layer=layers, n_head=heads, use_cache=False,
        bos_token_id=0, eos_token_id=0, **config,
    )  # fmt: skip


gpt2 = gpt2_of(640, 4, 10)
"""25 million parameters, which are 100 MB: more than fit one bucket."""


def wrapped(
    budget_gb: float | None, order: Order = "before", make: Callable[[], nn.Module] = gpt2, **options: Any
) -> nn.Module:
    """The model under DDP with `options`, plain (`budget_gb` None) or optimised before or after it is wrapped."""
    exact: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
    if budget_gb is not None and order == "before":
        return DistributedDataParallel(memopt.optimize(make(), budget_gb, **exact), **options)
    model = DistributedDataParallel(make(), **options)
    return model if budget_gb is None else memopt.optimize(model, budget_gb, **exact)


def batch(rank: int, number: int) -> dict[str, Tensor]:
    """Batch `number` of a rank: four texts of 64 tokens."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    tokens = torch.randint(0, VOCABULARY, (4, 64), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def fingerprint(tensor: Tensor) -> str:
    """A hash of the tensor's bits, made without a copy that would be measured."""
    return hashlib.sha256(tensor.detach().numpy().data).hexdigest()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int, accumulate: int = 1
) -> list[str]:
    """Train one step on `accumulate` batches, whose gradients are exchanged with the last; return the fingerprints of
    the last loss and of all gradients."""
    torch.manual_seed(step + rank)
    for number in range(accumulate):
        with nullcontext() if number == accumulate - 1 else model.no_sync():  # type: ignore[operator]
            loss = model(**batch(rank, accumulate * step + number)).loss
            loss.backward()
    gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    found = [fingerprint(loss), *map(fingerprint, gradients)]
    optimizer.step()
    optimizer.zero_grad()
    return found
