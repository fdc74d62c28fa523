"""Loops that replace their optimizer, as when layers are unfrozen: the first one's state is freed, and its successor's
counts in its place."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import memopt
from memopt.account.optimizer_trial import GivenOptimizer
from memopt.errors import GIB
from tests.elsewhere import counted

pytestmark = [pytest.mark.plans_always, pytest.mark.usefixtures(counted.__name__)]


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_the_state_of_a_replaced_optimizer_is_freed(kind: type[torch.optim.Optimizer]) -> None:
    model, x = layers(), torch.randn(512, 64)
    optimizer = kind(model.parameters())

    def step_bytes() -> int:
        with memopt.measure_peak("cpu") as peak:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return peak.bytes

    budget = 0.7 * max(step_bytes(), step_bytes())
    memopt.optimize(model, budget / GIB, optimizer=optimizer, precision="fp32", allow={"recompute", "reinplace"})
    assert max(step_bytes(), step_bytes()) <= budget
    first = weakref.ref(optimizer)
    optimizer = kind(model.parameters())
    gc.collect()
    assert first() is None
    assert max(step_bytes(), step_bytes(), step_bytes()) <= budget


def test_an_optimizer_that_is_gone_is_counted_by_its_options() -> None:
    given = GivenOptimizer.of(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.5, momentum=0.9))
    gc.collect()
    again = given.now([nn.Parameter(torch.zeros(2))])  # type: ignore[operator]
    assert again.defaults["momentum"] == 0.9
