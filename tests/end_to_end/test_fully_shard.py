"""FSDP2 on two ranks, planned region by region between its hooks: bitwise plain FSDP2's numbers, within the budget."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import memopt
from examples.models.ddp import VOCABULARY, fingerprint, gpt2_of
from examples.models.families import integers
from examples.models.fully_shard import FAMILIES, Family
from examples.models.settled_gloo import settled
from memopt.compat.tensors import shard_of
from tests.two_ranks import on_two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.plans_always]  # processes that plan several times
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
BUDGETS_GB = (0.36, 0.33, 0.3)
make = gpt2_of(320, 4, 4)


def batch(rank: int, number: int) -> dict[str, torch.Tensor]:
    """Texts whose activations are more than the parameters of all blocks."""
    tokens = integers(VOCABULARY, 24, 64, seed=100 * rank + number)
    return {"input_ids": tokens, "labels": tokens}


def trained(rank: int, budget_gb: float | None) -> tuple[list[list[str]], float]:
    """Hashes of the loss and of all sharded gradients of each of three steps, and the peak of those after the first."""
    model: Any = make()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    settled(fully_shard(model, mesh=mesh))
    optimizer = torch.optim.AdamW(model.parameters())
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, optimizer=optimizer, **EXACT)
    found, peak_gb = [], 0.0
    for step in range(3):
        gc.collect()
        torch.manual_seed(step + rank)
        with memopt.measure_peak("cpu") as peak:
            outputs = model(**batch(rank, step))  # held to the step's end, as plans of several regions have it
            outputs.loss.backward()
        loss = outputs.loss.detach()
        del outputs
        gradients = [shard_of(value.grad) for value in model.parameters()]
        found.append([fingerprint(loss), *map(fingerprint, gradients)])
        del gradients
        optimizer.step()
        optimizer.zero_grad()
        peak_gb = max(peak_gb, peak.gb if step else 0.0)
    if budget_gb is not None:
        assert peak_gb <= memopt.plan_of(model).predicted_peak_gb <= 1.02 * peak_gb
        account = memopt.plan_of(model).account
        own = sum(shard_of(value).nbytes for value in model.parameters())
        assert account.parameters == account.gradients == own
        assert 2 * own <= account.optimizer_state <= 2.1 * own
    return found, peak_gb


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_blocks_of_the_models_that_are_measured_are_found(family: Family) -> None:
    with torch.device("meta"):
        blocks = family.make().get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList)


def by_its_class(rank: int) -> tuple[int, int, int]:
    """The shards of a model that is planned for a class of optimisers, and the rows of its plan."""
    model: Any = fully_shard(gpt2_of(64, 2, 4)(), mesh=init_device_mesh("cpu", (2,)))
    memopt.optimize(model, 1.0, optimizer=torch.optim.AdamW, **EXACT)
    model(**batch(rank, 0)).loss.backward()
    account = memopt.plan_of(model).account
    return sum(shard_of(value).nbytes for value in model.parameters()), account.gradients, account.optimizer_state


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_given_by_its_class_has_its_state_counted() -> None:
    for own, gradients, state in on_two_ranks(by_its_class):
        assert gradients == own
        assert 2 * own <= state <= 2.1 * own


@pytest.mark.filterwarnings("ignore")
def test_numbers_are_those_of_plain_fsdp2_within_budgets() -> None:
    plain = on_two_ranks(trained, None)
    for budget_gb in BUDGETS_GB:  # each in processes of its own, so that no earlier model is in their memory
        for (found, peak_gb), (expected, plain_peak_gb) in zip(on_two_ranks(trained, budget_gb), plain, strict=True):
            assert found == expected
            assert peak_gb <= budget_gb < plain_peak_gb


def refusal(rank: int) -> str:
    """The refusal of a model under FSDP's first version."""
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="memopt does not plan") as error:
        memopt.optimize(model, 1.0)
    return str(error.value)


def test_the_first_version_of_fsdp_is_refused_in_words() -> None:
    for text in on_two_ranks(refusal):
        assert "by FullyShardedDataParallel" in text
        assert "fully_shard" in text
