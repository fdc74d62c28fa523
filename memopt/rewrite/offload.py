"""The lever that offloads activations to host memory."""

from __future__ import annotations

from collections.abc import Collection

from memopt.device import Hardware
from memopt.solver import Link

OFFLOAD_ACTIVATIONS = "offload_activations"


def offload_link(card: Hardware, allow: Collection[str]) -> Link | None:
    """Returns the link to host memory, or None if the device has none, as a CPU, or the lever is not allowed."""
    link = card.link
    return link if OFFLOAD_ACTIVATIONS in allow and link.bytes_per_second > 0 else None
