"""The sets of levers that a plan is sought with, from none to all that are allowed, and their order."""

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
    FUSED_OPS: "GELU, SiLU and layer norms that are written out run as one kernel each, which saves only its input; "
    "exact but for rounding",
    FUSED_ATTENTION: "attention that is written out runs as one kernel, which saves no probabilities; exact but for "
    "rounding",
    CHUNKED_LOSS: "the cross entropy of a linear layer in chunks, which never holds the logits; exact but for rounding",
}


@dataclass(frozen=True)
class LeverSet:
    """Levers that are applied together: those of the set before it in `lever_sets`, and one more."""

    levers: tuple[str, ...]
    rewriting: Rewriting
    next_is_faster: bool = False
    """Whether the next set promises a shorter step, so that it is tried even if this one fits the budget."""


def lever_sets(
    base: Rewriting, allow: Collection[str], *, card: Hardware | None = None, histories: str = ""
) -> tuple[LeverSet, ...]:
    """Returns `base` without levers, followed by sets that each add one allowed lever, the cheapest first.

    The field `needed` of each set's rewriting says that its newest lever must find something to rewrite. The 8-bit
    levers need `card`, and raise ValueError for a step in fp32. `histories`: see `DecideFp8`.
    """
    sets, fp8 = _LeverSets(base), fp8_lever(allow)
    quick = bool(fp8) and has_units(_required(card), fp8)
    if quick:
        sets.last = replace(sets.last, next_is_faster=True)
        sets.add(fp8, in_fp8(base, _required(card), fp8, histories))
    for lever, decide in ((FUSED_OPS, fuse_ops), (FUSED_ATTENTION, fuse_attention)):
        if lever in allow:
            sets.before = (*sets.before, decide)
            sets.add(lever, sets.base)
    if CHUNKED_LOSS in allow:
        for weight_in_backward in (False, True):
            # It stands after precision, since it computes in the dtype that the layer was given.
            sets.after = (ChunkLosses(weight_in_backward),)
            sets.add(CHUNKED_LOSS, sets.base)
    if fp8 and not quick:
        sets.add(fp8, in_fp8(sets.base, _required(card), fp8, histories))
    if FP8_ACTIVATIONS in allow:
        sets.add(FP8_ACTIVATIONS, activations_in_fp8(sets.base, _required(card)), finds=False)
    return tuple(sets.found)


def _required(card: Hardware | None) -> Hardware:
    assert card is not None, "the 8-bit levers are decided for a device: give card="
    return card


class _LeverSets:
    """The sets made so far, and the deciders that the next one shares."""

    def __init__(self, base: Rewriting) -> None:
        self.base = base
        self.before: tuple[Decide, ...] = ()
        """Deciders that run before those of `base`."""
        self.after: tuple[Decide, ...] = ()
        """Deciders that run after those of `base`."""
        self.found = [LeverSet((), base)]

    @property
    def last(self) -> LeverSet:
        return self.found[-1]

    @last.setter
    def last(self, lever_set: LeverSet) -> None:
        self.found[-1] = lever_set

    def add(self, lever: str, base: Rewriting, *, finds: bool = True) -> None:
        """Adds a set with one more lever, on a base that the later sets share.

        `finds`: whether the lever's decider reports if it found something to rewrite.
        """
        self.base = base
        levers = self.last.levers if lever in self.last.levers else (*self.last.levers, lever)
        deciders = (*self.before, *base.deciders, *self.after)
        needed = lever if finds else ""
        self.found.append(LeverSet(levers, replace(base, deciders=deciders, needed=needed)))
