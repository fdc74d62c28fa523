"""The lever that offloads activations to host memory; the solver chooses which."""

from __future__ import annotations

from collections.abc import Collection

from memopt.device import Hardware
from memopt.levers.lever import Lever
from memopt.levers.offload_parameters import OFFLOAD_PARAMETERS
from memopt.solver import Link

OFFLOAD_ACTIVATIONS = Lever(
    "offload_activations",
    "Saved activations are copied to pinned host memory in the forward, and back in the backward.",
    "bitwise",
    "host memory, and waiting for copies that compute does not hide; not on a CPU",
    default=True,
    tried_by="the solver",
)


def offload_link(card: Hardware, allow: Collection[str]) -> Link | None:
    """Returns the card's link to the host's memory. None where the device has no such link, as a CPU, or `allow`
    names no lever that uses it."""
    link = card.link
    used = {OFFLOAD_ACTIVATIONS.name, OFFLOAD_PARAMETERS.name}.intersection(allow)
    return link if used and link.bytes_per_second > 0 else None
