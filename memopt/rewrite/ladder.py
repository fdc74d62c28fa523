"""In which order levers are pulled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from memopt.capture.operators import Decide, Rewriting
from memopt.device import Hardware
from memopt.rewrite.attention import FUSED_ATTENTION, fuse_attention
from memopt.rewrite.fp8 import activations_in_fp8, fp8_lever, in_fp8
from memopt.rewrite.fused_ops import FUSED_OPS, fuse_ops
from memopt.rewrite.loss import CHUNKED_LOSS, ChunkLosses
from memopt.rewrite.precision.fp8 import FP8_ACTIVATIONS, has_units

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
    next_is_faster: bool = False
    """Whether the rung above promises a shorter step, and is to be tried however well this one fits."""


def ladder(
    base: Rewriting, allow: Collection[str], *, drop_logits: bool, card: Hardware | None = None, histories: str = ""
) -> tuple[Rung, ...]:
    """`base` alone, and then with one more of the allowed levers at a time, the cheapest first.

    Each rung's rewriting says by `needed` that its newest lever has to find something to do. The card is asked where
    levers of 8 bits are allowed; they raise ValueError for a step in fp32. `histories`: see `DecideFp8`.
    """
    rungs, fp8 = _Rungs(base), fp8_lever(allow)
    quick = bool(fp8) and has_units(_there(card), fp8)
    if quick:
        rungs.top = replace(rungs.top, next_is_faster=True)
        rungs.climb_on(fp8, in_fp8(base, _there(card), fp8, histories))
    for lever, decide in ((FUSED_OPS, fuse_ops), (FUSED_ATTENTION, fuse_attention)):
        if lever in allow:
            rungs.before = (*rungs.before, decide)
            rungs.climb_on(lever, rungs.base)
    if CHUNKED_LOSS in allow:
        for weight_in_backward in (False, True):
            # After precision: what it computes in is what the layer would.
            rungs.after = (ChunkLosses(drop_logits, weight_in_backward),)
            rungs.climb_on(CHUNKED_LOSS, rungs.base)
    if fp8 and not quick:
        rungs.climb_on(fp8, in_fp8(rungs.base, _there(card), fp8, histories))
    if FP8_ACTIVATIONS in allow:
        rungs.climb_on(FP8_ACTIVATIONS, activations_in_fp8(rungs.base, _there(card)), finds=False)
    return tuple(rungs.found)


def _there(card: Hardware | None) -> Hardware:
    assert card is not None, "8 bits are decided on for a card"
    return card


class _Rungs:
    """The rungs so far, and what the next one starts from."""

    def __init__(self, base: Rewriting) -> None:
        self.base = base
        self.before: tuple[Decide, ...] = ()
        """Deciders that are asked before those of `base`."""
        self.after: tuple[Decide, ...] = ()
        self.found = [Rung((), base)]

    @property
    def top(self) -> Rung:
        return self.found[-1]

    @top.setter
    def top(self, rung: Rung) -> None:
        self.found[-1] = rung

    def climb_on(self, lever: str, base: Rewriting, *, finds: bool = True) -> None:
        """One more rung, on a base that those above share; `finds`: whether its decider says if it has work."""
        self.base = base
        levers = self.top.levers if lever in self.top.levers else (*self.top.levers, lever)
        deciders = (*self.before, *base.deciders, *self.after)
        needed = lever if finds else ""
        self.found.append(Rung(levers, replace(base, deciders=deciders, needed=needed)))
