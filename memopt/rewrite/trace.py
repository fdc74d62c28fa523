"""Rewrites the regions of a recorded call by the passes of a lever set, and traces them into joint graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from memopt.capture.caller_modes import autocast_is_on
from memopt.capture.captured_call import CapturedCall
from memopt.capture.dynamo import in_brief
from memopt.capture.dynamo_graph import forward_of
from memopt.capture.joint import JointGraph, RegionTrace, autocast_to, differentiate
from memopt.capture.operators import (
    Decide,
    OperatorGraph,
    Operators,
    Rewriting,
    Untraceable,
    check_needed,
    to_differentiate,
)
from memopt.capture.region import RecordedRegion
from memopt.compat.fakes import fresh_fakes
from memopt.compat.operators import without_autocast
from memopt.compat.true_results import raising_for_refused_dtypes
from memopt.device.devices import kernels_of
from memopt.errors import CaptureError
from memopt.lru import LruCache

MOST_TRACES = 256
"""The number of pairs of a region and a backend whose joint graphs are kept."""
Traces: TypeAlias = LruCache[tuple[RecordedRegion, str], list[tuple[Rewriting, JointGraph]]]
"""The joint graphs traced last, so that a region in several calls is traced once: by region and backend its joint graph
under each rewriting, of which there are as many as lever sets."""


def rewrite(graph: OperatorGraph, deciders: Sequence[Decide], needed: str = "") -> Operators:
    """Call each decider, a function that chooses passes for a graph, with the graph that the passes before have made,
    and run the passes that it returns. Returns the graph after each pass, the decisions and their notes.

    `needed` is the label of a decision that must have chosen passes ("": none must). Raises `NothingToRewrite` where it
    has none, `ValueError` where no decision has that label, and `PassError` where a pass fails."""
    stages, decisions = [graph.module], []
    for decide in deciders:
        decisions.append(decide(replace(graph, module=stages[-1])))
        if needed and decisions[-1].pipeline.label == needed:
            check_needed(needed, [Operators(decisions=tuple(decisions))])
        stages += decisions[-1].pipeline.stages(stages[-1])
    if needed and all(decision.pipeline.label != needed for decision in decisions):
        raise ValueError(
            f"the lever {needed!r} has no pipeline of that label, by which memopt finds whether it changed anything; "
            f"have its function that chooses the passes of a graph return Decision(Pipeline(passes, label={needed!r}))"
        )
    notes = tuple(note for decision in decisions for note in decision.notes)
    return Operators(tuple(stages), tuple(decisions), notes, graph.author_typed)


def trace(region: RecordedRegion, rewriting: Rewriting, backend: str = "aten") -> JointGraph:
    """The joint graph of a region, rewritten as `rewriting` says; for a region without gradients its forward
    (`JointGraph.differentiated` is false).

    Raises `PassError` where a pass fails, `NothingToRewrite` where the lever with the label `rewriting.needed` finds no
    passes to run, and `CaptureError` where the region cannot be traced into a joint graph."""
    with region.modes.restored():
        operators = _rewritten_operators(region, rewriting)
        if operators is not None and operators.stages:
            traced = RegionTrace(region, to_differentiate(operators), None, backend, rewritten=True)
        else:
            traced = RegionTrace(region, *_not_rewritten(region, rewriting), backend, rewritten=False)
        decide_joint = None if autocast_is_on() else rewriting.joint
        with kernels_of(rewriting.card):
            return differentiate(traced, operators, decide_joint, reinplace=rewriting.reinplace)


def trace_call(
    captured: CapturedCall, rewriting: Rewriting, backend: str = "aten", traces: Traces | None = None
) -> tuple[JointGraph, ...]:
    """A joint graph for each time that a region runs in a call, in that order; each region is traced once, and regions
    without gradients are left out.

    `traces` is a cache of graphs traced before. Raises `CaptureError` where no gradient flows to any parameter, and
    `NothingToRewrite` where the lever with the label `rewriting.needed` finds no passes to run in any region. Also
    raises what `trace` raises."""
    regional = rewriting if captured.whole else replace(rewriting, needed="")
    regions = {id(run.region): run.region for run in captured.runs}
    traces = LruCache(MOST_TRACES) if traces is None else traces
    traced = {number: traced_once(region, regional, backend, traces) for number, region in regions.items()}
    joints = tuple(traced[id(run.region)] for run in captured.runs if traced[id(run.region)].differentiated)
    if not joints:
        raise CaptureError("the result of the call depends on no trainable parameter; make some require gradients")
    if not captured.whole:
        check_needed(rewriting.needed, [joint.operators or Operators() for joint in joints])
    return joints


def traced_once(region: RecordedRegion, rewriting: Rewriting, backend: str, known: Traces) -> JointGraph:
    """The joint graph of a region under a rewriting, from the cache `known` or traced now; for "aten" in place of
    `backend` if sizes in the region depend on data. Raises as `trace` does."""
    backend = "aten" if region.depends_on_data else backend  # inductor cannot compile the checks of such sizes
    of_region = known.get((region, backend)) or []
    for other, joint in of_region:
        if other == rewriting:
            return joint
    joint = trace(region, rewriting, backend)
    known[region, backend] = [*of_region, (rewriting, joint)]
    return joint


def forward_as_planned(region: RecordedRegion, rewriting: Rewriting) -> Callable[..., Any]:
    """A region's forward as a function without gradients, in the dtypes that the rewriting gives it."""
    with region.modes.restored():
        operators = _rewritten_operators(region, replace(rewriting, needed=""))
        stages = operators.stages if operators is not None else ()
        module, low = (stages[-1], None) if stages else _not_rewritten(region, rewriting)

    run = forward_of(module)

    def forward(*inputs: Any) -> Any:
        with without_autocast() if stages else autocast_to(low, region):
            return run(*inputs)

    return forward


def _rewritten_operators(region: RecordedRegion, rewriting: Rewriting) -> Operators | None:
    """The region's rewritten operator graph; None where neither passes nor autocast need one. Under autocast its casts
    must be written out: AOTAutograd would cast a weight once per use and so sum its gradients in another dtype than
    the plain model does."""
    if not torch.is_grad_enabled() or not (rewriting or autocast_is_on() or region.has_autocast):
        return None
    try:
        graph = region.operator_graph(rewriting.planned_for)
    except Untraceable as reason:
        check_needed(rewriting.needed, [Operators()])
        _, dtypes = _own_dtypes(region, rewriting.autocast)
        return Operators(notes=(f"a region is not rewritten by passes, since {reason}{dtypes}",))
    return rewrite(graph, rewriting.deciders, rewriting.needed)


def _own_dtypes(region: RecordedRegion, low: torch.dtype | None) -> tuple[torch.dtype | None, str]:
    """The autocast dtype that a region runs under which passes do not rewrite, and how it gets its dtypes, as the end
    of a sentence. The dtype is None where `low`, that of the rewriting, is None or the caller's autocast is on, and
    where the author's code fails under autocast or takes derivatives."""
    if low is None or autocast_is_on():
        return None, ""
    if region.takes_derivatives:
        return None, f", and keeps the dtypes of its code: derivatives of derivatives are not taken in {low}"
    if failure := _fails_under_autocast(region, low):
        return None, f", and keeps the dtypes of its code, which fails under torch.autocast with {low} ({failure})"
    return low, f"; it runs under torch.autocast with {low}"


def _not_rewritten(region: RecordedRegion, rewriting: Rewriting) -> tuple[fx.GraphModule, torch.dtype | None]:
    """The graph of a region that passes do not rewrite, and the autocast dtype that it runs under, if any."""
    low, _ = _own_dtypes(region, rewriting.autocast)
    return region.graph_module if low is None else region.for_autocast, low


def _fails_under_autocast(region: RecordedRegion, dtype: torch.dtype) -> str:
    """The error of a region's code under autocast and not without it, such as an operator that has no kernel for the
    dtype; else empty."""
    known = region.failures_under_autocast
    if dtype not in known:
        failure = _failure(region, dtype)
        known[dtype] = failure if failure and not _failure(region, None) else ""
    return known[dtype]


def _failure(region: RecordedRegion, autocast: torch.dtype | None) -> str:
    """The error of a region's code on fake tensors, under `autocast` if that is not None; empty where it has none."""
    with region.tracing(), autocast_to(autocast, region):
        mode, fakes = fresh_fakes(region.inputs)
        try:
            with mode, raising_for_refused_dtypes():
                region.for_autocast(*fakes)
        except RuntimeError as failure:
            return in_brief(failure)
    return ""
