"""The schedule of one region, and its joint graph with every recomputation and every copy as a node."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from memopt.capture.joint import JointGraph
from passes import ApplyOffloads, ApplySchedule, HostStay


@dataclass(frozen=True)
class RegionSchedule:
    """In which order a region's nodes run, which run several times, and which values are offloaded meanwhile."""

    fingerprint: str
    """Hash of the joint graph that the schedule is for."""
    evaluations: tuple[str, ...]
    """Node names in the order in which they run; a recomputed node is named once for each time."""
    boundary: int
    """How many of `evaluations` belong to the forward."""
    offloads: tuple[HostStay, ...] = ()
    """Values that are copied to the host and back."""
    steps: tuple[int, ...] = ()
    """Numbers of the inputs that are parameters which the optimiser steps before the end of the backward."""


def scheduled_graph(joint: JointGraph, schedule: RegionSchedule) -> fx.GraphModule:
    """The joint graph with a node for each recomputation of the schedule, and for each copy to and from the host."""
    order = schedule.evaluations, schedule.boundary, joint.forward_outputs
    return (ApplyOffloads(*order, schedule.offloads) if schedule.offloads else ApplySchedule(*order))(joint.module)
