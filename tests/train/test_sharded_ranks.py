"""Two ranks under FSDP2 train as one process does on all of the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.train.test_effective_batch import batch, built, step_of
from tests.two_ranks import on_two_ranks


def trained(rank: int) -> dict[int, dict[str, Any]]:
    """A step on uneven microbatches, and one that only rank 1 cannot take, by the number of calls in a batch."""
    found = {}
    for accumulate in (1, 2):
        model: Any = fully_shard(built(), mesh=init_device_mesh("cpu", (2,)))
        step = step_of(model, accumulate=accumulate)
        microbatches = [batch(rank, number) for number in range(2)]
        result = [step(given) for given in ([microbatches] if accumulate == 1 else microbatches)][-1]
        weight = model.weight.full_tensor().detach().clone()
        poisoned = (torch.full((8, 8), float("nan") if rank else 1.0), batch(rank, 0)[1])
        skipped = [step(poisoned) for _ in range(accumulate)][-1].skipped
        found[accumulate] = {
            "weight": weight,
            "loss": float(result.loss),
            "norm": result.grad_norm,
            "skipped": skipped,
            "after": model.weight.full_tensor().detach().clone(),
        }
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_sharded_ranks_with_uneven_tokens_are_one() -> None:
    ranks = on_two_ranks(trained)
    model = built()
    result = step_of(model)([batch(rank, number) for rank in range(2) for number in range(2)])
    for found in (rank[accumulate] for rank in ranks for accumulate in (1, 2)):
        torch.testing.assert_close(found["weight"], model.weight.detach(), rtol=1e-6, atol=1e-7)
        assert found["loss"] == pytest.approx(float(result.loss), rel=1e-6)
        assert type(found["norm"]) is torch.Tensor
        assert float(found["norm"]) == pytest.approx(float(result.grad_norm), rel=1e-6)  # type: ignore[arg-type]
        assert found["skipped"], "on both ranks, though only one has seen the NaN"
        assert torch.equal(found["after"], found["weight"])
