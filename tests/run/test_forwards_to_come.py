"""Forwards that nobody expects before a backward: those that wait may not have taken all the room by then."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from memopt.run.entry import Entry
from memopt.run.ledger import Moment

EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
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
    assert [Moment(entry, waiting=waiting).beyond_expected for waiting in range(6)] == [0, 0, 0, 3, 4, 5]
    for waiting in range(5):
        entry.begin(waiting)
    entry.begin(0)
    assert entry.groups_done == 1
    assert entry.others_expected == 4
    assert [Moment(entry, waiting=waiting).beyond_expected for waiting in range(6)] == [0, 0, 0, 0, 0, 5]
