"""Random states as plain values, which `torch.load(weights_only=True)` accepts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from memopt.training_state import generator_states, set_generators


def random_state(devices: Iterable[torch.device]) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, of the last on the CPU and on the CUDA devices given."""
    python, (kind, keys, *rest), cpu, _ = generator_states(torch.device("cpu"))
    return {
        "python": python,
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "cpu": cpu.get_state(),
        "cuda": {str(device): torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"},
    }


def set_random_state(state: dict[str, Any], devices: Iterable[torch.device]) -> None:
    """Set the generators back to what `random_state` returned; its tensors may be on any device.

    Generators of CUDA devices that are not among `devices` are left as they are.
    """
    kind, keys, *rest = state["numpy"]
    numpy = (kind, keys.cpu().numpy().astype(np.uint32), *rest)
    cpu = torch.Generator().set_state(state["cpu"].cpu())
    set_generators((state["python"], numpy, cpu, None), torch.device("cpu"))
    for device in devices:
        if str(device) in state["cuda"]:
            torch.cuda.set_rng_state(state["cuda"][str(device)].cpu(), device)
