"""The joint graph of a region as inductor's own passes and decompositions leave it, right before it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import fx

from memopt.compat.inductor import InductorFailed, compile_by_inductor
from memopt.errors import CaptureError
from passes import copy_graph_module


class _JointGraphTraced(Exception):
    """The joint graph is there: compilation goes no further."""


def trace_by_inductor(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule | None, int]:
    """The joint graph of a region, and how many of its first results are the forward's; None without gradients.

    To be called in the tracing context of the region. Raises `CaptureError` where inductor gives up.
    """
    found: list[tuple[fx.GraphModule, int]] = []

    def look(joint: fx.GraphModule, *_: Any, num_fwd_outputs: int, **__: Any) -> Any:
        found.append((joint, num_fwd_outputs))
        raise _JointGraphTraced

    try:
        with suppress(_JointGraphTraced):  # inductor takes over what it compiles
            compile_by_inductor(copy_graph_module(module), list(inputs), look, _as_compiled, lambda: "no plan")
    except InductorFailed as failure:
        raise not_compiled(failure) from failure
    return found[0] if found else (None, 0)


def not_compiled(failure: InductorFailed) -> CaptureError:
    """What a user is told of a region that inductor gives up on."""
    reason = " ".join(str(failure).split())[:300]
    return CaptureError(f"inductor does not compile it: {reason}; give optimize backend='aten'")


def _as_compiled(compiled: Any, inputs: list[fx.Node], is_backward: bool) -> Any:
    return compiled
