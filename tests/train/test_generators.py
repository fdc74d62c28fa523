"""Random states as plain values."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from memopt.train.step_state import random_state, set_random_state

CPU = {torch.device("cpu")}


def drawn() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), float(torch.randn(()))


def test_all_generators_go_on_from_a_loaded_state() -> None:
    drawn()  # numpy keeps a second normal number for later
    file = io.BytesIO()
    torch.save(random_state(CPU), file)
    expected = [drawn() for _ in range(3)]
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for _ in range(2):
        set_random_state(state, CPU)
        assert [drawn() for _ in range(3)] == expected


def test_states_of_devices_that_are_not_used_are_left_out() -> None:
    state = random_state(CPU)
    assert state["cuda"] == {}
    set_random_state({**state, "cuda": {"cuda:7": state["cpu"]}}, CPU)
