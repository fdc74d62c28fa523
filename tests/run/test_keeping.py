"""Blocks under FSDP2 on two ranks that stay gathered until their backward: the same bits with fewer gathers, as many as
the budget has room for on every rank, and undone by `memopt.remove`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt
from examples.models.ddp import VOCABULARY, fingerprint, gpt2_of
from examples.models.families import integers
from examples.models.settled_gloo import counted, settled
from memopt.compat.exchanges import Resharding
from memopt.compat.tensors import is_sharded, shard_of
from memopt.errors import GIB
from tests.two_ranks import on_two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
BLOCKS, ROOMY_GB = 4, 1.0
make = gpt2_of(128, BLOCKS, 4)


class Trained:
    """A model that takes steps, whose gathers and peaks are noted."""

    def __init__(self, rank: int, budget_gb: float | None, length: int, **options: Any) -> None:
        self.rank, self.length = rank, length
        self.model: Any = make()
        blocks, mesh = self.model.transformer.h, init_device_mesh("cpu", (2,))
        for block in blocks:
            fully_shard(block, mesh=mesh, **options)
        settled(fully_shard(self.model, mesh=mesh))
        self.calls = counted(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if budget_gb is not None:
            memopt.optimize(self.model, budget_gb, optimizer=self.optimizer, **EXACT)

    def step(self, number: int) -> tuple[list[str], int, float]:
        """Fingerprints of the loss and the gradients, the number of gathers, and the peak in bytes."""
        gc.collect()
        self.calls.clear()
        torch.manual_seed(10 * self.rank + number)
        tokens = integers(VOCABULARY, 8, self.length, seed=10 * self.rank + number)
        with memopt.measure_peak("cpu") as peak:
            outputs = self.model(input_ids=tokens, labels=tokens)
            outputs.loss.backward()
        gradients = [fingerprint(shard_of(value.grad)) for value in self.model.parameters()]
        found = [fingerprint(outputs.loss), *gradients]
        del outputs
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found, len(self.calls), peak.bytes

    def evaluated(self) -> int:
        """The number of blocks that are gathered after an evaluation."""
        with torch.no_grad():
            self.model.eval()(input_ids=integers(VOCABULARY, 1, 8))
        self.model.train()
        left = sum(any(map(_is_gathered, block.module.parameters())) for block in self.freed())
        self.model.reshard()
        return left

    def freed(self) -> Any:
        """The blocks that FSDP2 frees after the forward."""
        return Resharding(self.model).blocks


def _is_gathered(parameter: torch.Tensor) -> bool:
    return not is_sharded(parameter)


def trained(rank: int, budget_gb: float | None, lengths: tuple[int, int] = (64, 64), **options: Any) -> dict[str, Any]:
    """Three steps, and what is left behind an evaluation and behind `memopt.remove`."""
    run = Trained(rank, budget_gb, lengths[rank], **options)
    steps = [run.step(number) for number in range(3)]
    found: dict[str, Any] = {
        "bits": [bits for bits, *_ in steps],
        "gathers": [gathers for _, gathers, _ in steps],
        "peak": max(peak for *_, peak in steps[1:]),
    }
    if budget_gb is not None:
        plan = memopt.plan_of(run.model)
        found |= {"planned": plan.predicted_peak_bytes, "kept": plan.kept, "text": str(plan), "diff": str(plan.diff())}
        found["gathered after evaluation"] = run.evaluated()
        memopt.remove(run.model)
        found["gathers once removed"] = run.step(3)[1]
    found["freed"] = len(run.freed())
    return found


def on_both(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
    """The results of `trained` on both ranks, in their own processes."""
    return on_two_ranks(_call, trained, arguments, options)


def _call(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(rank, *arguments, **options)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return on_both(None)


@pytest.fixture(scope="module")
def roomy() -> list[dict[str, Any]]:
    return on_both(ROOMY_GB)


def check(found: dict[str, Any], expected: dict[str, Any], kept: int) -> None:
    """Check a run with so many blocks kept against the plain one."""
    assert found["bits"] == expected["bits"]
    assert expected["gathers"] == [2 * BLOCKS + 1] * 3
    assert found["gathers"] == [2 * BLOCKS + 1 - kept] * 3
    assert [path for path, _ in found["kept"]] == [f"transformer.h.{n}" for n in range(BLOCKS - kept, BLOCKS)]
    assert found["peak"] <= found["planned"] <= 1.02 * found["peak"]
    assert found["gathered after evaluation"] == 0
    assert found["gathers once removed"] == 2 * BLOCKS + 1
    assert found["freed"] == expected["freed"] == BLOCKS


def test_all_blocks_stay_where_there_is_room(plain: list[dict[str, Any]], roomy: list[dict[str, Any]]) -> None:
    for found, expected in zip(roomy, plain, strict=True):
        check(found, expected, BLOCKS)
        assert "parameters of transformer.h.0 to transformer.h.3 stay" in found["text"]
        assert "kept gathered" in found["diff"]


def test_as_many_stay_as_fit(plain: list[dict[str, Any]], roomy: list[dict[str, Any]]) -> None:
    block = roomy[0]["kept"][0][1]
    budget_gb = (roomy[0]["planned"] - 1.5 * block) / GIB
    for found, expected in zip(on_both(budget_gb), plain, strict=True):
        check(found, expected, BLOCKS - 2)
        assert found["peak"] <= budget_gb * GIB


def test_ranks_with_other_lengths_keep_the_same_blocks(roomy: list[dict[str, Any]]) -> None:
    """The first rank has room for all of them."""
    budget_gb = (roomy[0]["planned"] - 1.5 * roomy[0]["kept"][0][1]) / GIB
    for found, expected in zip(on_both(budget_gb, (32, 64)), on_both(None, (32, 64)), strict=True):
        check(found, expected, BLOCKS - 2)


def test_a_choice_of_the_user_stays() -> None:
    for found in on_both(ROOMY_GB, reshard_after_forward=False):
        assert found["kept"] == ()
        assert found["gathers"] == [BLOCKS + 1] * 3
        assert found["freed"] == 0
