"""Random generators: their states, read and set; and draws at the ends of their range."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from memopt.device.devices import device_of

GENERATORS = random.Random, np.random.Generator, np.random.RandomState, torch.Generator
_HIGHEST_WORD = 0x12DD9BB3
"""The word in the state of a Mersenne Twister for which it returns the highest number."""
_EXTREME_WORDS = 600


def state_of(generator: Any) -> Any:
    """The state of a random generator, which is of one of the types in `GENERATORS`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """The states of Python's random generator, numpy's, torch's on the CPU and torch's on `device`. That on the CPU is
    a copied generator, since a state tensor would count as memory of the step."""
    own = device_of(device).generator_state(device)
    return random.getstate(), np.random.get_state(), torch.default_generator.clone_state(), own


def draws_so_far() -> Any:
    """A value that changes when random numbers are drawn from Python's generator or numpy's."""
    return random.getstate(), pickle.dumps(np.random.get_state())


@contextmanager
def extreme_draws(*, highest: bool) -> Iterator[None]:
    """A context in which Python's generator and numpy's draw their highest or lowest numbers, for some hundred draws.
    At its end both get back the states that they had at its beginning."""
    before = random.getstate(), np.random.get_state()
    version, words, _ = random.Random(0).getstate()
    words = *[_HIGHEST_WORD if highest else 0] * _EXTREME_WORDS, *words[_EXTREME_WORDS:-1]
    random.setstate((version, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def set_generators(states: tuple[Any, ...], device: torch.device) -> None:
    """Sets the generators to states that `generator_states` returned for the same device."""
    python, numpy, host, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(host.get_state())
    if own is not None:
        device_of(device).set_generator_state(device, own)
