"""The schedule of one region, and its joint graph with every recomputation and every copy as a node."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from memopt.capture.joint import JointGraph
from memopt.planning.joined import Joined
from memopt.planning.priced_step import TracedStep
from memopt.solver import Schedule
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


def split(joined: Joined, traced: TracedStep, schedule: Schedule) -> tuple[RegionSchedule, ...]:
    """The part of a joint schedule that belongs to each region."""
    evaluations: list[list[str]] = [[] for _ in traced.regions]
    boundaries = [0] * len(traced.regions)
    remaining = [priced.problem.forward_ops for priced in joined.prices]
    seen: set[int] = set()
    for index in schedule.evaluations:
        region, local = joined.owner[index]
        name = joined.prices[region].nodes[local]
        if name:
            evaluations[region].append(name)
        if index not in seen and local < joined.prices[region].problem.forward_ops:
            remaining[region] -= 1
            if remaining[region] == 0:
                boundaries[region] = len(evaluations[region])
        seen.add(index)
    offloads = _region_offloads(joined, schedule)
    steps = tuple(sorted(step.number for step in joined.steps.values()))
    return tuple(
        RegionSchedule(region.fingerprint, tuple(names), boundary, tuple(offloads.get(number, ())), steps)
        for number, (region, names, boundary) in enumerate(zip(traced.regions, evaluations, boundaries, strict=True))
    )


def _region_offloads(joined: Joined, schedule: Schedule) -> dict[int, list[HostStay]]:
    """Region → its offloads, with positions among its own evaluations; regions without offloads are left out.

    An event while another region runs moves to the end of this region's forward or to the start of its backward: the
    value's device memory is then free earlier, and for longer, than planned.
    """
    if not schedule.offloads:
        return {}
    regions = range(len(joined.prices))
    before = [[0] for _ in regions]  # region → position in the schedule → number of the region's evaluations before it
    for index in schedule.evaluations:
        owner, local = joined.owner[index]
        for region in regions:
            before[region].append(before[region][-1] + (region == owner and bool(joined.prices[owner].nodes[local])))
    values = [(region, value) for region in regions for value in joined.prices[region].values]
    offloads: dict[int, list[HostStay]] = {}
    for offload in schedule.offloads:
        region, value = values[offload.storage]
        own = before[region]
        later = (own[offload.freed_before], own[offload.fetch_from], own[offload.back_before])
        offloads.setdefault(region, []).append(HostStay(value, own[offload.out_after + 1] - 1, *later))
    return offloads
