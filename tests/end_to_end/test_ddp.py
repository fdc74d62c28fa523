"""`DistributedDataParallel` with more parameters than fit one bucket: budget, gradients, accumulation."""

from __future__ import annotations

import gc
import hashlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from tests.two_ranks import on_two_ranks

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
Steps = list[list[str]]


def gpt2() -> nn.Module:
    """25 million parameters, which are 100 MB."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8_400, n_positions=64, n_embd=640, n_layer=4, n_head=10, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def batch(rank: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    tokens = torch.randint(0, 8_400, (4, 64), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def fingerprint(tensor: torch.Tensor) -> str:
    """A hash of the tensor's bits, made without a copy that would be measured."""
    return hashlib.sha256(tensor.detach().numpy().data).hexdigest()


def train(model: nn.Module, rank: int, *, steps: int, accumulate: int) -> Steps:
    """Train with AdamW; the loss and the gradients of each step as fingerprints."""
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(steps):
        torch.manual_seed(step + rank)
        for number in range(accumulate):
            with nullcontext() if number == accumulate - 1 else model.no_sync():  # type: ignore[operator]
                loss = model(**batch(rank, accumulate * step + number)).loss
                loss.backward()
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        found.append([fingerprint(loss), *map(fingerprint, gradients)])
        optimizer.step()
        optimizer.zero_grad()
    return found


def wrapped(budget_gb: float | None, order: str, **options: Any) -> nn.Module:
    """The model under DDP, plain (`budget_gb` None) or optimised before or after it is wrapped."""
    if budget_gb is None:
        return DistributedDataParallel(gpt2(), **options)
    if order == "before":
        return DistributedDataParallel(memopt.optimize(gpt2(), budget_gb, **EXACT), **options)
    return memopt.optimize(DistributedDataParallel(gpt2(), **options), budget_gb, **EXACT)


def measured(
    rank: int, budget_gb: float | None, order: str = "", *, steps: int, accumulate: int, **options: Any
) -> tuple[Steps, int]:
    """What `train` returns, and the peak in bytes from the making of the model on: the buckets are counted."""
    gc.collect()
    with memopt.measure_peak() as peak:
        model = wrapped(budget_gb, order, **options)
        found = train(model, rank, steps=steps, accumulate=accumulate)
        if budget_gb is not None:
            assert len(memopt.plan_of(model).regions) == 1
            assert memopt.plan_of(model).account.buckets == sum(p.nbytes for p in model.parameters()) > 100e6
    return found, peak.bytes


def accumulated(rank: int) -> list[Any]:
    return [
        measured(rank, None, steps=2, accumulate=2),
        measured(rank, BUDGET_GB, "before", steps=2, accumulate=2),
    ]


BUDGET_GB = 0.525


@pytest.mark.filterwarnings("ignore")
def test_100_mb_of_parameters() -> None:
    for (plain, plain_peak), *planned in on_two_ranks(accumulated):
        assert plain_peak > BUDGET_GB * 1024**3
        for found, peak in planned:
            assert peak <= BUDGET_GB * 1024**3
            assert found == plain


def five_budgets(rank: int) -> list[Any]:
    plain = measured(rank, None, steps=2, accumulate=1)
    orders = [("before", "after")[number % 2] for number in range(5)]
    views = {"gradient_as_bucket_view": True}
    pairs = zip(FIVE_GB, orders, strict=True)
    return [plain, *(measured(rank, budget_gb, order, steps=2, accumulate=1, **views) for budget_gb, order in pairs)]


FIVE_GB = (0.43, 0.44, 0.455, 0.47, 0.48)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_five_budgets() -> None:
    for (plain, _), *planned in on_two_ranks(five_budgets):
        for (found, peak), budget_gb in zip(planned, FIVE_GB, strict=True):
            assert peak <= budget_gb * 1024**3
            assert found == plain
