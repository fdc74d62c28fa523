"""The levers that replace activations, norms and attention written as elementary operators by fused ones."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.capture.operators import Decision, OperatorGraph
from memopt.levers.lever import GraphChange, Lever
from passes import (
    EliminateDeadCode,
    Found,
    FuseActivations,
    FuseAttention,
    FuseNorms,
    Pass,
    Pipeline,
    find_activations,
    find_attentions,
    find_norms,
)

LABEL = "fused_ops"
ATTENTION = "fused_attention"


def fuse_ops(graph: OperatorGraph) -> Decision:
    """Decides which formulas of a region become `gelu`, `silu` or `layer_norm`: all that are equal but for rounding."""
    activations, norms = find_activations(graph.module), find_norms(graph.module)
    passes: list[Pass] = []
    if fused := _fused(activations):
        passes.append(FuseActivations(frozenset(fused)))
    if normed := _fused(norms):
        passes.append(FuseNorms(frozenset(normed)))
    reasons = [formula.reason for formula in (*activations, *norms)]
    left = dict.fromkeys(f"{LABEL}: some formulas are left as they are, since {reason}" for reason in reasons if reason)
    if not passes:
        return Decision(Pipeline((), label=LABEL), notes=tuple(left))
    done = f"{LABEL}: {len(fused)} activations and {len(normed)} norms run as one kernel each; equal but for rounding"
    pipeline = Pipeline((*passes, EliminateDeadCode()), label=LABEL)
    return Decision(pipeline, dict.fromkeys([*fused, *normed], "fused"), (done, *left))


def _fused(found: Sequence[Found]) -> list[str]:
    return [formula.name for formula in found if not formula.reason]


FUSED_OPS = Lever(
    LABEL,
    "GELU, SiLU and layer norms written as elementary operators run as one kernel each, which saves its input only.",
    "rounding",
    "nothing",
    default=True,
    graph=GraphChange((fuse_ops,), "before"),
)


def fuse_attention(graph: OperatorGraph) -> Decision:
    """Decides which softmaxes of a region become part of a `scaled_dot_product_attention`: all those for which it
    computes the same values but for rounding.

    Attention with dropout stays as it is, since the fused kernel would draw other random numbers."""
    found = find_attentions(graph.module)
    fused = [softmax for softmax in found if not softmax.reason]
    reasons = dict.fromkeys(softmax.reason for softmax in found if softmax.reason)
    left = tuple(f"{ATTENTION}: some attention is left as it is, since {reason}" for reason in reasons)
    if not fused:
        return Decision(Pipeline((), label=ATTENTION), notes=left)
    names = dict.fromkeys((softmax.name for softmax in fused), "fused")
    passes = FuseAttention(frozenset(names)), EliminateDeadCode()
    done = f"{ATTENTION}: {len(fused)} of {len(found)} attentions run as one kernel each; equal but for rounding"
    return Decision(Pipeline(passes, label=ATTENTION), names, (done, *left))


FUSED_ATTENTION = Lever(
    ATTENTION,
    "Attention written as matmuls and a softmax runs as one kernel, which saves no probabilities.",
    "rounding",
    "nothing",
    default=True,
    graph=GraphChange((fuse_attention,), "before"),
)
