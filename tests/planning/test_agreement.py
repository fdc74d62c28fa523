"""The first plan under a key is that of all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import distributed, nn

import memopt
from memopt.planning import plan_cache as agreement
from memopt.planning.plan_cache import Kept, agreed


@pytest.fixture
def kept() -> Kept:
    plan = memopt.plan(nn.Linear(8, 1), 1, (torch.ones(2, 8),), outputs="all")
    return Kept(plan, plan.solved[1], 0)


def test_the_first_decides(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    store = distributed.HashStore()
    monkeypatch.setattr(agreement, "shared_store", lambda: store)
    other = replace(kept, plan=replace(kept.plan, added_seconds=1.0))
    assert agreed("a call", kept) is kept
    found = agreed("a call", other)
    assert found.plan.added_seconds == kept.plan.added_seconds
    assert found.schedule == kept.schedule
    assert agreed("another call", other) is other


def test_one_process_decides_alone(kept: Kept) -> None:
    assert agreed("a call", kept) is kept
