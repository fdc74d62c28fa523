"""Generators of an optimiser: seeded alike, restored to where they were, and copied with it."""

from __future__ import annotations

import copy

import torch

from memopt.optimizers.bf16_parameters import _Generators

CPU = torch.device("cpu")


def draw(generators: _Generators) -> list[float]:
    return torch.rand(3, generator=generators.on(CPU)).tolist()


def test_the_seed_decides_and_a_copy_goes_on_where_the_original_is() -> None:
    first, second = _Generators(1), _Generators(1)
    assert draw(first) == draw(second) != draw(_Generators(2))
    assert draw(copy.deepcopy(first)) == draw(first) == draw(second)


def test_saved_states_are_restored() -> None:
    generators = _Generators(1)
    draw(generators)
    states = generators.states()
    expected, other = draw(generators), _Generators(5)
    other.set_states(states)
    assert (draw(other), other.seed) == (expected, 1)
