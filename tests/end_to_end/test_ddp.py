"""`DistributedDataParallel` with more parameters than fit one bucket: budget, gradients, accumulation."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import memopt
from examples.models.ddp import Order, gpt2_of, train_step, wrapped
from memopt.account.elsewhere import look
from memopt.compat.ddp import unwrapped
from memopt.run.session import session_of
from tests.marks import slow
from tests.two_ranks import on_ranks, on_two_ranks

Steps = list[list[str]]
narrow = gpt2_of(64, 2, 4)
"""2.6 MB of parameters, for buckets of 0.5 MB."""


def measured(
    rank: int, budget_gb: float | None, order: Order = "before", *, accumulate: int, **options: Any
) -> tuple[Steps, int]:
    """The fingerprints of three steps with AdamW, and the peak in bytes from the making of the model on, so that the
    buckets are counted."""
    gc.collect()
    with memopt.measure_peak() as peak:
        model = wrapped(budget_gb, order, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        found = [train_step(model, optimizer, rank, step, accumulate) for step in range(3)]
        if budget_gb is not None:
            assert len(memopt.plan_of(model).regions) == 1
            assert memopt.plan_of(model).account.buckets == sum(p.nbytes for p in model.parameters())
    return found, peak.bytes


OPTIONS: dict[str, dict[str, Any]] = {"narrow": {"make": narrow, "bucket_cap_mb": 0.5}, "100 MB": {}}


def accumulated(rank: int, budget_gb: float, name: str) -> list[Any]:
    return [measured(rank, budget, accumulate=2, **OPTIONS[name]) for budget in (None, budget_gb)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "budget_gb"), [("narrow", 0.036), ("100 MB", 0.525)])
def test_gradients_accumulate_in_several_buckets(name: str, budget_gb: float) -> None:
    for (plain, plain_peak), (found, peak) in on_two_ranks(accumulated, budget_gb, name):
        assert peak <= budget_gb * 1024**3 < plain_peak
        assert found == plain


def five_budgets(rank: int) -> list[Any]:
    orders: tuple[Order, ...] = ("before", "after", "before", "after", "before")
    plain = measured(rank, None, accumulate=1)
    views = {"gradient_as_bucket_view": True}
    return [plain, *(measured(rank, *pair, accumulate=1, **views) for pair in zip(FIVE_GB, orders, strict=True))]


FIVE_GB = (0.43, 0.44, 0.455, 0.47, 0.48)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_five_budgets() -> None:
    for (plain, _), *planned in on_two_ranks(five_budgets):
        for (found, peak), budget_gb in zip(planned, FIVE_GB, strict=True):
            assert peak <= budget_gb * 1024**3
            assert found == plain


def beside_the_step(rank: int, static_graph: bool) -> tuple[int, int]:
    """The bytes of the buckets, and those elsewhere after a step whose gradients, views of the buckets, were read."""
    options: dict[str, Any] = {"bucket_cap_mb": 0.5, "gradient_as_bucket_view": True, "static_graph": static_graph}
    model = wrapped(0.1, "after", narrow, **options)
    train_step(model, torch.optim.AdamW(model.parameters()), rank, 0)
    gc.collect()
    session = session_of(unwrapped(model))
    assert session is not None
    buckets = session.parallel.buckets()
    assert buckets is not None
    nbytes, addresses = session.parallel.bucket_memory()
    found = look(unwrapped(model), torch.device("cpu"), bucket_bytes=nbytes, buckets=addresses)
    return buckets.nbytes, found.other


@pytest.mark.plans_always
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("static_graph", [False, slow(True)])
def test_buckets_that_python_has_seen_are_not_elsewhere(static_graph: bool) -> None:
    ((buckets, elsewhere),) = on_ranks(1, beside_the_step, static_graph)
    assert buckets > 2**20
    assert elsewhere < buckets / 10
