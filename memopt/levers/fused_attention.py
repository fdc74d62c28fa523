"""The lever that replaces attention written as matmuls and a softmax by the fused operator."""

from __future__ import annotations

from memopt.capture.operators import Decision, OperatorGraph
from memopt.levers.lever import GraphChange, Lever
from passes import EliminateDeadCode, FuseAttention, Pipeline, find_attentions

LABEL = "fused_attention"


def fuse_attention(graph: OperatorGraph) -> Decision:
    """Decides which softmaxes of a region become part of a `scaled_dot_product_attention`: all those for which it
    computes the same values but for rounding.

    Attention with dropout stays as it is, since the fused kernel would draw other random numbers."""
    found = find_attentions(graph.module)
    fused = [softmax for softmax in found if not softmax.reason]
    reasons = dict.fromkeys(softmax.reason for softmax in found if softmax.reason)
    left = tuple(f"{LABEL}: some attention is left as it is, since {reason}" for reason in reasons)
    if not fused:
        return Decision(Pipeline((), label=LABEL), notes=left)
    names = dict.fromkeys((softmax.name for softmax in fused), "fused")
    passes = FuseAttention(frozenset(names)), EliminateDeadCode()
    done = f"{LABEL}: {len(fused)} of {len(found)} attentions run as one kernel each; equal but for rounding"
    return Decision(Pipeline(passes, label=LABEL), names, (done, *left))


FUSED_ATTENTION = Lever(
    LABEL,
    "Attention written as matmuls and a softmax runs as one kernel, which saves no probabilities.",
    "rounding",
    "nothing",
    default=True,
    graph=GraphChange((fuse_attention,), "before"),
)
