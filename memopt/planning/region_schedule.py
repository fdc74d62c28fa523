"""The schedule of one region, and the joint graph with every evaluation of it as a node."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from memopt.capture.joint import JointGraph
from passes import ApplyOffloads, ApplySchedule, HostStay


@dataclass(frozen=True)
class RegionSchedule:
    """The schedule of one region: node names in the order of their evaluation, the first `boundary` in the forward, and
    what waits on the host in the meantime."""

    fingerprint: str
    evaluations: tuple[str, ...]
    boundary: int
    stays: tuple[HostStay, ...] = ()
    steps: tuple[int, ...] = ()
    """Numbers of the inputs that are parameters which the optimiser steps within the backward, before its end."""


def scheduled_graph(joint: JointGraph, schedule: RegionSchedule) -> fx.GraphModule:
    """The joint graph with every evaluation of the schedule as a node of its own, and every copy to the host."""
    how = schedule.evaluations, schedule.boundary, joint.forward_outputs
    return (ApplyOffloads(*how, schedule.stays) if schedule.stays else ApplySchedule(*how))(joint.module)
