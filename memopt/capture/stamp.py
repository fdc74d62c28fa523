"""Traces a module with runs of equal blocks faster: only five blocks of each run are traced, and copied for the others.

The module is traced without the missing blocks and with all inputs, so that the trace finds out about inputs and
outputs what a trace of the whole module would. Where the five blocks do not prove what the missing ones are, the whole
module is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from torch import fx

from memopt.capture.blocks import TEMPLATE, BlockRun, find_runs
from memopt.capture.copies import with_copies
from memopt.capture.marks import mark_operators, traced_from
from memopt.capture.standing import standing_blocks
from memopt.compat.joint_trace import constants_as_attributes


class _Trace(Protocol):
    """A dataclass with the graph that was traced from a module, None where nothing is differentiated. The graph returns
    the forward's `forward_outputs` results first, then gradients, if it has a backward."""

    @property
    def module(self) -> fx.GraphModule | None: ...
    @property
    def forward_outputs(self) -> int: ...


_Traced = TypeVar("_Traced", bound=_Trace)


def trace_blocks_once(
    trace: Callable[[fx.GraphModule], _Traced],
    module: fx.GraphModule,
    inputs: Sequence[Any],
    written: Collection[int],
) -> _Traced:
    """The result of `trace(module)`, found faster where the module has runs of equal blocks: `trace` gets a module with
    five blocks of each run, and the graph that it returns is completed with copies. `inputs` are the values of the
    module's placeholders, `written` the numbers of those that it writes to."""
    inlined = not [*module.parameters(), *module.buffers()]
    runs = find_runs(module, inputs, written) if inlined else ()
    if not runs:
        return trace(module)
    traced = trace(_without_missing(module, runs))
    if traced.module is not None:
        standing = standing_blocks(traced.module, traced.forward_outputs, module, runs)
        if standing is not None:
            marked = any(map(traced_from, module.graph.nodes))
            whole: Any = with_copies(standing, marked=marked)
            return replace(traced, module=whole)  # type: ignore[type-var]
    return trace(module)


def _without_missing(module: fx.GraphModule, runs: Sequence[BlockRun]) -> fx.GraphModule:
    """A copy of a module without the missing blocks: nodes that read the last of them read the template instead."""
    instead = {
        node: run.blocks[TEMPLATE][place]
        for run in runs
        for number in run.missing
        for place, node in enumerate(run.blocks[number])
    }
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node not in instead:
            copies[node] = graph.node_copy(node, lambda source: copies[instead.get(source, source)])
            copies[node].meta = dict(node.meta)
    mark_operators(graph)
    reduced = fx.GraphModule(module, graph, type(module).__name__)
    reduced.meta.update(module.meta)
    return constants_as_attributes(reduced)
