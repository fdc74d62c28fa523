"""Makes planned regions callable, with the backend that their joint graphs were traced for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from memopt.capture.data_sizes import guard_sizes
from memopt.capture.joint import JointGraph
from memopt.compat.saved_tensors import set_versions
from memopt.compat.tracing import boxed, first_runs_as_later_ones, mark_boxed
from memopt.emit.gradients import Accumulation, telling, withholding
from memopt.emit.inductor import compile_by_backend
from memopt.emit.partition import Emitted, exchanges_of, partition
from memopt.planning.plan import Plan
from memopt.planning.schedule_parts import RegionSchedule


def emit_plan(plan: Plan, accumulation: Accumulation) -> tuple[Emitted, ...]:
    """The regions of a planned call as functions, in the order of the forward.

    `accumulation` says, in each backward, how gradients reach `.grad`. Raises `CaptureError` where inductor fails to
    compile a region."""
    captured = plan.captured
    assert captured is not None, "a plan loaded from a file has no graphs to make functions from: plan the call again"
    return tuple(
        emit_region(joint, schedule, accumulation, captured.sizes_of(number), plan)
        for number, (joint, schedule) in enumerate(zip(captured.regions, plan.regions, strict=True))
    )


def emit_region(
    joint: JointGraph,
    schedule: RegionSchedule,
    accumulation: Accumulation,
    allowed_sizes: Mapping[str, int],
    plan: Plan | None = None,
) -> Emitted:
    """One region as a differentiable function of its inputs, whose forward and backward follow `schedule`. The forward
    raises `SizeOutgrown` where a data-dependent size is above its limit in `allowed_sizes`, by symbol.

    With a `plan` for CUDA, torch's allocator holds no more than its budget while compiled kernels are timed. A compiled
    backward adds gradients to `.grad`, where `accumulation` allows it, only if the plan counts on existing ones."""
    # A compiled backward clones the gradients that it cannot add to an existing `.grad`.
    adds = plan is None or plan.account.gradients_held or not joint.fused
    limit_bytes = plan.budget_bytes - plan.account.context if plan is not None and plan.account.caching else None
    exchanges = 0

    def cut(*_: Any, **__: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        nonlocal exchanges
        forward, backward = partition(joint, schedule, accumulation if adds else None)
        guard_sizes(forward, allowed_sizes)
        exchanges = exchanges_of(forward.graph, backward.graph)
        return forward, backward

    with joint.trace.active(), first_runs_as_later_ones():
        if joint.fused:
            emitted = compile_by_backend(joint, cut, accumulation, allowed_sizes, limit_bytes)
        else:
            written = sorted(map(joint.place_of, joint.statistics))
            run = joint.trace.aot.compile(
                cut,
                lambda forward, _: keeping_versions(boxed(forward), written),
                lambda backward, _: telling(withholding(boxed(backward), joint), accumulation),
            )
            emitted = Emitted(run)
    return replace(emitted, run=detaching(emitted.run, joint.inputs_without_gradients), exchanges=exchanges)


def detaching(run: Callable[..., Any], positions: Collection[int]) -> Callable[..., Any]:
    """A function that calls `run`, the function of a region, with the inputs at `positions` detached. These inputs get
    no gradient: if their autograd nodes were visited in the backward, hooks would be called with None, and DDP would
    count the parameters as used."""
    if not positions:
        return run

    def run_detached(*inputs: Any) -> Any:
        return run(*(value.detach() if at in positions else value for at, value in enumerate(inputs)))

    return run_detached


def keeping_versions(forward: Callable[[list[Any]], Any], numbers: Sequence[int]) -> Callable[[list[Any]], Any]:
    """A function that runs a region's `forward` and then sets the version counters (`Tensor._version`) of its arguments
    at the positions `numbers` back, before autograd saves any. These are running statistics of batch norms: eager
    kernels write to them without raising the counter. The graph raises it at each write; after a second forward,
    autograd would then refuse the backward of the first, which saved them."""
    if not numbers:
        return forward

    def keeping(arguments: list[Any]) -> Any:
        written = [arguments[number] for number in numbers]
        versions = [tensor._version for tensor in written]
        results = forward(arguments)
        set_versions(written, versions)
        return results

    return mark_boxed(keeping)
