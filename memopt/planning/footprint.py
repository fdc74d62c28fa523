"""How much memory a compiled region takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Footprint:
    """Bytes that a compiled forward and backward hold beside the region's inputs."""

    forward_bytes: int
    """Peak of the forward."""
    held_bytes: int
    """Bytes that the forward leaves: its outputs, and what the backward reads."""
    backward_bytes: int
    """Peak of the backward, including what the forward left, until its last use."""
    left_bytes: int
    """Bytes that the backward leaves: gradients, the outputs of the forward, and the gradients of those."""
    ways: tuple[tuple[tuple[bool, int, int], ...], ...] = ()
    """The allocator's calls in both, as `BlockCall`s: where the forward's outputs are kept, and where these are dropped
    before the backward, as for `step_ways`; empty on the CPU."""
