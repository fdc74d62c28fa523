"""The time that a planned step takes beside its operators."""

from __future__ import annotations

_REGION_SECONDS = 2.5e-3
"""The time of a region: its guards, the check of what the device holds, autograd's node."""
_GRADIENT_SECONDS = 40e-6
"""The time of an input with a gradient: its guard, its place among the inputs, its gradient handed out."""


def host_seconds(regions: int, gradients: int) -> float:
    """Seconds by which a planned step takes longer on the host than the same operators of a plain step.

    On a CPU they add to the step; on a GPU they are hidden while its queue of kernels does not run empty. Both
    constants are fitted to measurements on one core of a server (`benchmarks/host_time.py`).
    """
    return regions * _REGION_SECONDS + gradients * _GRADIENT_SECONDS
