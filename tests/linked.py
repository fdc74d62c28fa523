"""A CPU with a simulated link to host memory, which the CPU's meter does not count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memopt.device import Hardware, hardware_of
from memopt.planning import terms as model_terms
from passes.ops.offload_ops import host_memory

RATE = 20e9
ALLOW = {"recompute", "offload_activations"}


def linked_cpu(device: torch.device) -> Hardware:
    return replace(hardware_of(device), link_bytes_per_second=RATE, link_efficiency=1.0)


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans for this CPU offload, and count the host memory in use from here on."""
    monkeypatch.setattr(model_terms, "hardware_of", linked_cpu)
    memory = host_memory("cpu")
    assert memory.leased_bytes == 0, "an earlier test left values on the host"
    memory.most_leased_bytes = 0
