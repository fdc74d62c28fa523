"""What a plan depends on beside the call that is planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Situation:
    """What surrounds a training call when its forward begins."""

    gradients_held: bool = False
    """Gradients are there before the step: gradient accumulation."""
    other_forwards: int = 0
    """Bytes that forwards hold whose backward is still to come."""
    to_come: int = 0
    """The number of further forwards of this model before its first backward, each of which may hold as much as this
    one; their gradients are among `other_forwards`."""
    elsewhere: int | None = None
    """The bytes on the device beside the step that the plan must leave room for; None: those that are found there."""
    hooked: frozenset[int] = frozenset()
    """The `id`s of parameters whose gradients hooks wait for: those are not added in place."""
