"""Makes planned regions callable, by the backend that their joint graphs were traced for."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from memopt.capture.data_sizes import guard_sizes
from memopt.capture.joint import JointGraph
from memopt.emit.aten import compile_as_aten
from memopt.emit.emitted import Emitted
from memopt.emit.gradients import Accumulation
from memopt.emit.inductor import compile_by_backend
from memopt.emit.partition import partition
from memopt.planning.plan import Plan
from memopt.planning.region_schedule import RegionSchedule


def emit_plan(plan: Plan, accumulation: Accumulation) -> tuple[Emitted, ...]:
    """The regions of a planned call as functions, one for each run; runs of one region with one schedule share theirs.

    `accumulation` is asked in each backward whether gradients may be added to `.grad` one by one. Raises `CaptureError`
    where inductor gives up.
    """
    captured = plan.captured
    assert captured is not None, "a plan from a file has no graphs to emit"
    made: dict[tuple[int, frozenset[int], RegionSchedule], Emitted] = {}
    for joint, schedule in zip(captured.regions, plan.regions, strict=True):
        key = id(joint.trace), joint.parameter_inputs, schedule
        if key not in made:
            # Code that is compiled takes a copy of a gradient that it cannot add to one that is there.
            adds = plan.account.gradients_held or not joint.fused
            sizes = captured.data_sizes.allowed if len(plan.regions) == 1 else {}
            made[key] = emit_region(joint, schedule, accumulation if adds else None, sizes)
    return tuple(
        made[id(joint.trace), joint.parameter_inputs, schedule]
        for joint, schedule in zip(captured.regions, plan.regions, strict=True)
    )


def emit_region(
    joint: JointGraph,
    schedule: RegionSchedule,
    accumulation: Accumulation | None,
    allowed_sizes: Mapping[str, int],
) -> Emitted:
    """One region as a function of its inputs, differentiable by the halves that its schedule cuts it into.

    Its forward raises `SizeOutgrown` where a size that depends on data is above what is allowed.
    """

    def cut() -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(joint, schedule, accumulation)
        guard_sizes(forward, allowed_sizes)
        return forward, backward

    compile_halves = compile_by_backend if joint.fused else compile_as_aten
    with joint.trace.active():
        return compile_halves(joint, cut)
