"""The circumstances of a training call on which its plan depends beside the call itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Buckets:
    """The memory from which `DistributedDataParallel` exchanges gradients, beside what it holds of a forward."""

    nbytes: int
    views: bool = False
    """Gradients are views of the buckets once they are exchanged."""
    hold_gradients: bool = False
    """Each gradient becomes such a view as soon as it is computed, or is one already."""
    clone_outputs: bool = False
    """The wrapper returns clones of the model's outputs."""


@dataclass(frozen=True)
class Situation:
    """The circumstances of a training call when its forward begins."""

    gradients_held: bool = False
    """Gradients are there before the step: gradient accumulation."""
    other_forwards: int = 0
    """Bytes that forwards hold whose backward is still to come."""
    to_come: int = 0
    """The number of further forwards of this model before its first backward, each of which may hold as much as this
    one; their gradients are among `other_forwards`."""
    meanwhile: int = 0
    """Bytes that the caller's own code takes, and frees, between the forward and its backward."""
    spared: int | None = 0
    """Bytes that steps of other models take between the forward and its backward, which are left free as far as the
    budget allows; None: they are not known yet, and the forward holds as little as it can."""
    elsewhere: int | None = None
    """The bytes on the device beside the step that the plan must leave room for; None: those that are found there."""
    hooked: frozenset[int] = frozenset()
    """The `id`s of parameters whose gradients hooks wait for: those are not added in place."""
    buckets: Buckets | None = None
    """The buckets of the `DistributedDataParallel` around the model; None without one."""
