"""Two processes under `DistributedDataParallel` train as one does on all of the data."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from examples.models.families import integers, normals
from memopt import TrainStep
from memopt.compat.ddp import unwrapped
from memopt.train.effective_batch import mean_over_ranks

TOKENS = [[3, 0], [7, 1]]
"""Valid targets of each rank's microbatches."""


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 5)


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 2 * rank + number
    targets = integers(5, 8, seed=seed)
    targets[TOKENS[rank][number] :] = -100
    return normals(8, 8, seed=seed), targets


def step_of(model: nn.Module, **options: Any) -> TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return TrainStep(model, optimizer, loss_fn=nn.functional.cross_entropy, **options)


def counted_exchange(seen, bucket):
    """Not annotated: torch compares annotations, which are strings here."""
    seen.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def train_rank(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    results = {}
    for accumulate in (1, 2):
        model = DistributedDataParallel(built())
        exchanges: list[int] = []

        model.register_comm_hook(exchanges, counted_exchange)
        step = step_of(model, accumulate=accumulate)
        microbatches = [batch(rank, number) for number in range(2)]
        result = [step(microbatch) for microbatch in ([microbatches] if accumulate == 1 else microbatches)][-1]
        poisoned = (torch.full((8, 8), float("nan") if rank else 1.0), batch(rank, 0)[1])
        skipped = [step(poisoned) for _ in range(accumulate)][-1].skipped
        results[accumulate] = {
            "weight": model.module.weight.detach(),
            "loss": float(result.loss),
            "norm": float(result.grad_norm),  # type: ignore[arg-type]
            "exchanges": len(exchanges),
            "skipped": skipped,
        }
    torch.save(results, Path(folder) / str(rank))
    # No teardown: the group's destructor joins gloo's thread while it holds the GIL that this thread may wait for.
    os._exit(0)


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_with_uneven_tokens_are_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train_rank, (folder,), nprocs=2)
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    model = built()
    result = step_of(model)([batch(rank, number) for rank in range(2) for number in range(2)])
    for found in (rank[accumulate] for rank in ranks for accumulate in (1, 2)):
        torch.testing.assert_close(found["weight"], model.weight.detach(), rtol=1e-6, atol=1e-7)
        assert found["loss"] == pytest.approx(float(result.loss), rel=1e-6)
        assert found["norm"] == pytest.approx(float(result.grad_norm), rel=1e-6)  # type: ignore[arg-type]
        assert found["exchanges"] == 2, "once an effective batch, the skipped one included"
        assert found["skipped"], "on both ranks, though only one has seen the NaN"


def test_alone() -> None:
    model = nn.Linear(1, 1)
    assert unwrapped(model) is model
    values = torch.ones(2)
    assert mean_over_ranks(values, model) is values
