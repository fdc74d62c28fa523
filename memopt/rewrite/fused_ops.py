"""The lever that replaces activations and norms that are written out by fused operators."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.capture.operators import Decision, OperatorGraph
from passes import (
    EliminateDeadCode,
    FoundActivation,
    FoundNorm,
    FuseActivations,
    FuseNorms,
    Pass,
    Pipeline,
    find_activations,
    find_norms,
)

FUSED_OPS = "fused_ops"


def fuse_ops(graph: OperatorGraph) -> Decision:
    """Decides which formulas of a region become `gelu`, `silu` or `layer_norm`: all that compute the same."""
    activations, norms = find_activations(graph.module), find_norms(graph.module)
    passes: list[Pass] = []
    if fused := _fused(activations):
        passes.append(FuseActivations(frozenset(fused)))
    if normed := _fused(norms):
        passes.append(FuseNorms(frozenset(normed)))
    reasons = [activation.reason for activation in activations] + [norm.reason for norm in norms]
    left = dict.fromkeys(f"{FUSED_OPS}: left alone, since {reason}" for reason in reasons if reason)
    if not passes:
        return Decision(Pipeline((), label=FUSED_OPS), notes=tuple(left))
    done = f"{FUSED_OPS}: {len(fused)} activations and {len(normed)} norms; equal but for rounding"
    pipeline = Pipeline((*passes, EliminateDeadCode()), label=FUSED_OPS)
    return Decision(pipeline, dict.fromkeys([*fused, *normed], "fused"), (done, *left))


def _fused(found: Sequence[FoundActivation] | Sequence[FoundNorm]) -> list[str]:
    return [formula.name for formula in found if not formula.reason]
