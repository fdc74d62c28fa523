"""FSDP2 with a mixed precision policy trains within a budget as it does plain: gathered in bf16, reduced in fp32."""

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

pytestmark = pytest.mark.slow  # two ranks plan and train
SHARES = (0.85, 0.75, 0.65)
make = gpt2_of(256, 4, 4)


def sharded() -> Any:
    torch.manual_seed(0)
    model: Any = make()
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    settled(model)
    return model.train()


def steps(rank: int, budget_gb: float | None) -> tuple[float, list[list[str]], float]:
    """The peak of two steps, their losses and gradients, and the predicted peak."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if budget_gb is not None:
        planned(model, budget_gb, optimizer)
    values, most = [], 0.0
    for number in range(2):
        tokens = integers(VOCABULARY, 16, 64, seed=100 * rank + number)
        gc.collect()
        with memopt.measure_peak("cpu") as peak:
            output = model(input_ids=tokens, labels=tokens)
            output.loss.backward()
            gradients = [fingerprint(shard_of(value.grad)) for value in model.parameters()]
            optimizer.step()
        values.append([fingerprint(output.loss), *gradients])
        most = max(most, peak.gb)
        del output
        optimizer.zero_grad()
    return most, values, memopt.plan_of(model).predicted_peak_gb if budget_gb is not None else 0.0


@pytest.mark.filterwarnings("ignore")
def test_steps_are_those_of_the_same_policy_within_budgets() -> None:
    """Each way in processes of its own, since nothing elsewhere on the device is looked for under FSDP2."""
    plain = on_two_ranks(steps, None)
    most = max(peak_gb for peak_gb, _, _ in plain)
    for share in SHARES:
        for (_, values, _), (peak_gb, found, predicted_gb) in zip(
            plain, on_two_ranks(steps, share * most), strict=True
        ):
            assert found == values
            assert peak_gb <= share * most
            assert 1 <= predicted_gb / peak_gb <= 1.02
