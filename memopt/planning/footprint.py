"""What a lowered region holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes that a region's halves hold beside its inputs."""

    forward_bytes: int
    """The most at any moment of the forward."""
    held_bytes: int
    """What the forward leaves: outputs, and what the backward reads."""
    backward_bytes: int
    """The most at any moment of the backward; what the forward left is in it, until its last use."""
    left_bytes: int
    """What the backward leaves: gradients, the outputs of the forward, and the gradients of those."""
