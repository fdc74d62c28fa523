"""Gradients that accumulate under FSDP2, whole on each rank or as shards, count in the calls that add to them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memopt
from examples.models.ddp import VOCABULARY, fingerprint, gpt2_of
from examples.models.families import integers
from examples.models.fully_shard import planned
from examples.models.settled_gloo import settled
from memopt.compat.tensors import shard_of
from tests.two_ranks import on_two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # two ranks plan and train
SHARES = (0.9, 0.8)
WHOLE, SHARDS, WHOLE_IN_BF16 = "whole", "shards", "whole, gathered in bf16"
MICROBATCHES, STEPS = 3, 2
make = gpt2_of(256, 4, 4)


def sharded(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = make()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))}
    if kind == WHOLE_IN_BF16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, **options)
    settled(fully_shard(model, **options))
    return model.train()


def steps(rank: int, kind: str, budget_gb: float | None) -> tuple[list[list[str]], list[float], list[float]]:
    """Losses and gradients by step; of each call the peak, measured and predicted."""
    model = sharded(kind)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if budget_gb is not None:
        planned(model, budget_gb, optimizer)
    values, measured, predicted = [], [], []
    for step in range(STEPS):
        losses = []
        for number in range(MICROBATCHES):
            model.set_requires_gradient_sync(kind == SHARDS or number == MICROBATCHES - 1)
            tokens = integers(VOCABULARY, 16, 64, seed=100 * rank + 10 * step + number)
            gc.collect()
            with memopt.measure_peak("cpu") as peak:
                output = model(input_ids=tokens, labels=tokens)
                output.loss.backward()
            losses.append(fingerprint(output.loss.detach()))
            del output
            if step:  # with the optimiser's state
                measured.append(peak.gb)
                predicted.append(memopt.plan_of(model).predicted_peak_gb if budget_gb is not None else 0.0)
        values.append([*losses, *(fingerprint(shard_of(value.grad)) for value in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return values, measured, predicted


@pytest.mark.parametrize("kind", [WHOLE, SHARDS, WHOLE_IN_BF16])
def test_calls_that_add_to_gradients_keep_the_budget(kind: str) -> None:
    plain = on_two_ranks(steps, kind, None)
    most = max(max(measured) for _, measured, _ in plain)
    for share in SHARES:
        for (expected, _, _), (values, measured, predicted) in zip(
            plain, on_two_ranks(steps, kind, share * most), strict=True
        ):
            assert values == expected
            assert max(measured) <= share * most
            assert all(found <= said <= 1.02 * found for found, said in zip(measured, predicted, strict=True))
