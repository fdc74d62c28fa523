"""The joint graph of a region after inductor's own passes and decompositions, right before it is partitioned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import fx

from memopt.compat.inductor import InductorFailed, compile_by_inductor
from memopt.errors import CaptureError
from passes import copy_graph_module


class _JointGraphTraced(Exception):
    """Ends inductor's compilation once the joint graph is traced."""


def trace_by_inductor(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule | None, int]:
    """A region's joint graph and the number of its leading results that are the forward's; None and 0 for a region
    without gradients.

    It must be called in the region's tracing context. Raises `CaptureError` where inductor fails.
    """
    found: list[tuple[fx.GraphModule, int]] = []

    def take_joint(joint: fx.GraphModule, *_: Any, num_fwd_outputs: int, **__: Any) -> Any:
        _tag_forward(joint.graph, num_fwd_outputs)
        found.append((joint, num_fwd_outputs))
        raise _JointGraphTraced

    try:
        with suppress(_JointGraphTraced):  # a copy, because inductor changes the module that it compiles
            compile_by_inductor(copy_graph_module(module), list(inputs), take_joint, _as_compiled, lambda: "no plan")
    except InductorFailed as failure:
        raise not_compiled(failure) from failure
    return found[0] if found else (None, 0)


def _tag_forward(graph: fx.Graph, forward_outputs: int) -> None:
    """Take the mark of the backward from operators that an output of the forward needs: where a pass of inductor's
    replaces an operator by an equal one (`x - zeros` by `x`), that one may have got it."""
    results: Any = graph.output_node().args[0]
    needed = [result for result in results[:forward_outputs] if isinstance(result, fx.Node)]
    seen = set(needed)
    while needed:
        node = needed.pop()
        if node.meta.get("partitioner_tag") == "is_backward":
            node.meta["partitioner_tag"] = "is_forward"
        needed += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)


def not_compiled(failure: InductorFailed) -> CaptureError:
    """The error for a user whose region inductor failed to compile."""
    reason = " ".join(str(failure).split())[:300]
    return CaptureError(f"inductor does not compile it: {reason}; give optimize backend='aten'")


def _as_compiled(compiled: Any, inputs: list[fx.Node], is_backward: bool) -> Any:
    """The compiled graph itself: for a region without gradients inductor compiles the forward."""
    return compiled
