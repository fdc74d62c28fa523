"""Random states as plain values, which `torch.load(weights_only=True)` accepts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from memopt.compat.host import HOST
from memopt.device.devices import device_of
from memopt.training_state import generator_states, set_generators

_HOST, _CARDS = "cpu", "cuda"
"""Names in saved states, of whatever cards they are."""


def random_state(devices: Iterable[torch.device]) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, of the last on the host and on the cards given."""
    python, (kind, keys, *rest), host, _ = generator_states(HOST)
    states = {device: device_of(device).generator_state(device) for device in devices}
    return {
        "python": python,
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        _HOST: host.get_state(),
        _CARDS: {str(device): state for device, state in states.items() if state is not None},
    }


def set_random_state(state: dict[str, Any], devices: Iterable[torch.device]) -> None:
    """Set the generators back to what `random_state` returned; its tensors may be on any device.

    Generators of cards that are not among `devices` are left as they are.
    """
    kind, keys, *rest = state["numpy"]
    numpy = (kind, keys.cpu().numpy().astype(np.uint32), *rest)
    host = torch.Generator().set_state(state[_HOST].cpu())
    set_generators((state["python"], numpy, host, None), HOST)
    for device in devices:
        if str(device) in state[_CARDS]:
            device_of(device).set_generator_state(device, state[_CARDS][str(device)].cpu())
