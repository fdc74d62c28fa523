"""The share of a budget that is left to the forwards of other models."""

from __future__ import annotations

import weakref

import pytest
from torch import nn

from memopt.account.optimizer_trial import GivenOptimizer
from memopt.planning.derived import StepBytes
from memopt.run.entry import Entry
from memopt.run.seen import Overlap, breadth, room_for_others


def entry(needs: StepBytes) -> Entry:
    found = Entry(nn.Linear(1, 1), 1000, given_optimizer=GivenOptimizer.of("adam"))
    found.plain_step_bytes = needs
    return found


def test_the_rest_is_shared_in_proportion() -> None:
    one, other = entry(StepBytes(0, 5, 10, 50, 60)), entry(StepBytes(0, 1, 20, 30, 40))
    seen = [Overlap((), weakref.ref(one)), Overlap((weakref.ref(one),), weakref.ref(other))]
    assert [overlap.held_bytes(least=True) for overlap in seen] == [10, 25]
    assert [overlap.held_bytes(least=False) for overlap in seen] == [60, 90]
    assert room_for_others(seen, 10, 75, 1000) == 90, "all have room"
    assert room_for_others(seen, 10, 75, 35) == 25, "there is room for the least alone"
    assert room_for_others(seen, 10, 75, 35 + 65) == 25 + 65 // 2
    assert room_for_others([], 10, 75, 100) == 0


def test_entries_that_are_gone_need_nothing() -> None:
    one = entry(StepBytes(0, 5, 10, 50, 60))
    overlap = Overlap((), weakref.ref(one))
    del one
    assert overlap.held_bytes(least=True) == 0


def test_a_model_of_twice_the_layers_is_twice_as_broad() -> None:
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    assert breadth(nn.Sequential(*layers)) == 4 * 64
    assert breadth(nn.Sequential(*layers, *(nn.Linear(64, 64), nn.ReLU()) * 2)) == pytest.approx(6 * 64)
    decoder = nn.Sequential(nn.Linear(16, 4096), nn.Unflatten(1, (16, 16, 16)), nn.Conv2d(16, 16, 3))
    assert breadth(decoder) == 3 * 16
