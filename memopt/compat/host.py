"""The host, by torch's name for it: tensors in its memory are read without waiting for a device."""

from __future__ import annotations

import torch

__all__ = ["HOST", "is_on_host"]

HOST = torch.device("cpu")


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the host's memory."""
    return tensor.device.type == HOST.type
