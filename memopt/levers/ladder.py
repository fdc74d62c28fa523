"""In which order levers are pulled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from memopt.capture.operators import Decide, Rewriting
from memopt.levers.attention import FUSED_ATTENTION, fuse_attention
from memopt.levers.fused_ops import FUSED_OPS, fuse_ops
from memopt.levers.loss import CHUNKED_LOSS, ChunkLosses

OPERATOR_LEVERS = {
    FUSED_OPS: "GELU, SiLU and layer norms that are written out run as one kernel each, which keeps its input alone; "
    "exact but for rounding",
    FUSED_ATTENTION: "attention that is written out runs as one kernel, which keeps no probabilities; exact but for "
    "rounding",
    CHUNKED_LOSS: "the cross entropy of a linear layer in chunks, which never holds the logits; exact but for rounding",
}


@dataclass(frozen=True)
class Rung:
    """Some levers, all that the rung below has and one more."""

    levers: tuple[str, ...]
    rewriting: Rewriting


def ladder(base: Rewriting, allow: Collection[str], *, drop_logits: bool) -> tuple[Rung, ...]:
    """`base` alone, and then with one more of the allowed levers at a time, the cheapest first.

    Each rung's rewriting says by `needed` that its newest lever has to find something to do.
    """
    rungs = [Rung((), base)]
    before: tuple[Decide, ...] = ()
    for lever, decide in ((FUSED_OPS, fuse_ops), (FUSED_ATTENTION, fuse_attention)):
        if lever in allow:
            before = (*before, decide)
            rungs.append(_rung((*rungs[-1].levers, lever), base, before))
    if CHUNKED_LOSS in allow:
        # After precision: what it computes in is what the layer would.
        levers = (*rungs[-1].levers, CHUNKED_LOSS)
        for weight_in_backward in (False, True):
            after = (ChunkLosses(drop_logits, weight_in_backward),)
            rungs.append(_rung(levers, base, before, after))
    return tuple(rungs)


def _rung(levers: tuple[str, ...], base: Rewriting, before: tuple[Decide, ...], after: tuple[Decide, ...] = ()) -> Rung:
    deciders = (*before, *base.deciders, *after)
    return Rung(levers, replace(base, deciders=deciders, needed=levers[-1]))
