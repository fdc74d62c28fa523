"""The lever that has activations wait in the host's memory."""

from __future__ import annotations

from collections.abc import Collection

from memopt.device import Hardware
from memopt.solver import Link

OFFLOAD_ACTIVATIONS = "offload_activations"


def offload_link(card: Hardware, allow: Collection[str]) -> Link | None:
    """The road that activations may take to the host; None where there is none, as on a CPU, or it may not be used."""
    link = card.link
    return link if OFFLOAD_ACTIVATIONS in allow and link.bytes_per_second > 0 else None
