"""The lever that fuses attention which is written out."""

from __future__ import annotations

from memopt.capture.operators import Decision, OperatorGraph
from passes import EliminateDeadCode, FuseAttention, Pipeline, find_attentions

FUSED_ATTENTION = "fused_attention"


def fuse_attention(graph: OperatorGraph) -> Decision:
    """Which softmaxes of a region become `scaled_dot_product_attention`: those where that means the same.

    Attention with dropout stays, since the fused kernel would draw other random numbers.
    """
    found = find_attentions(graph.module)
    fused = [each for each in found if not each.reason]
    left = tuple(dict.fromkeys(f"{FUSED_ATTENTION}: left alone, since {each.reason}" for each in found if each.reason))
    if not fused:
        return Decision(Pipeline((), label=FUSED_ATTENTION), notes=left)
    passes = FuseAttention(frozenset(each.name for each in fused)), EliminateDeadCode()
    done = f"{FUSED_ATTENTION}: {len(fused)} of {len(found)} attentions; equal but for rounding"
    return Decision(Pipeline(passes, label=FUSED_ATTENTION), {each.name: "fused" for each in fused}, (done, *left))
