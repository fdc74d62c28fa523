"""Forwards that nobody expects before a backward: those that wait may not have taken all the room by then."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from memopt.planning.plan import Plan
from memopt.run.entry import Entry
from memopt.run.road import Road
from tests.elsewhere import counted
from tests.run.pieces import moment_of

__all__ = ["counted"]

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
STEPS, ROWS = 2, 512


def field() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8)).train()


def train(model: nn.Module) -> tuple[list[torch.Tensor], int]:
    """The losses of a solver's steps, each with 16 forwards one after the other, and the peak in bytes."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, most = [], 0
    for number in range(STEPS):
        torch.manual_seed(number)
        with memopt.measure_peak() as peak:
            y = torch.randn(ROWS, 8)
            for _ in range(16):
                y = y + 0.1 * model(y)
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        most = max(most, peak.bytes)
        losses.append(loss.detach())
    return losses, most


@pytest.mark.slow
def test_a_solver_that_calls_its_model_often_trains_in_half_at_once() -> None:
    gc.collect()
    expected, most = train(field())
    model = field()
    memopt.optimize(model, most / 2 / GIB, optimizer=torch.optim.SGD, **EXACT)
    losses, peak = train(model)
    assert peak <= most / 2
    assert all(map(torch.equal, losses, expected))


def test_as_many_forwards_again_are_expected_beyond_the_known_ones() -> None:
    entry = Entry(nn.Linear(1, 1), 1000)
    assert [moment_of(entry, waiting=waiting).beyond_expected for waiting in range(6)] == [0, 0, 0, 3, 4, 5]
    for waiting in range(5):
        entry.begin(waiting)
    entry.begin(0)
    assert entry.groups.done == 1
    assert entry.groups.others_expected == 4
    assert [moment_of(entry, waiting=waiting).beyond_expected for waiting in range(6)] == [0, 0, 0, 0, 0, 5]


def test_further_forwards_hold_as_much_as_after_one_that_held_no_less_than_the_first_one() -> None:
    entry = Entry(nn.Linear(1, 1), 1000)
    small, large = (cast(Plan, SimpleNamespace(held_bytes=held)) for held in (10, 100))
    assert entry.groups.held_after(large) == 100
    entry.groups.beside_waiting = 1, 10
    assert entry.groups.held_after(small) == 1
    assert entry.groups.held_after(large) == 100
    entry.groups.beside_waiting = 1, 100
    assert entry.groups.held_after(large) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_forwards_of_two_sizes_settle_on_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two run plain, and leave the further ones no room. The caller keeps a little more in each step."""
    searches, search = [0], Road._searched

    def counting(*args: Any, **kwargs: Any) -> Any:
        searches[0] += 1
        return search(*args, **kwargs)

    monkeypatch.setattr(Road, "_searched", counting)
    layers = (layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU()))
    model, losses = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2)), []
    optimizer = torch.optim.AdamW(model.parameters())
    memopt.optimize(model, 0.006, optimizer=optimizer, **EXACT)
    for _ in range(6):
        before = searches[0]
        views = [model(torch.rand(8, 8, size, size)) for size in (32, 32, 24, 24)]
        loss = sum(view.square().mean() for view in views)
        losses.append((loss.detach(), torch.zeros(400)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert searches[0] == before
