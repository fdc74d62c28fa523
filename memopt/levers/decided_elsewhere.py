"""Levers that change neither the captured graph nor the optimizer: other stages apply them, as `tried_by` says."""

from __future__ import annotations

from collections.abc import Collection

from memopt.compat.card import may_turn_on_expandable_segments
from memopt.device import Hardware
from memopt.levers.lever import Lever
from memopt.solver import Link

RECOMPUTE = Lever(
    "recompute",
    "Activations are recomputed in the backward instead of saved from the forward.",
    "bitwise",
    "the time of the recomputed operators, as little of it as any schedule within the budget needs",
    default=True,
    tried_by="the solver",
)
RECOMPUTE_LEFT_OUT = f"nothing is recomputed, since allow leaves out {RECOMPUTE.name!r}"
REINPLACE = Lever(
    "reinplace",
    "Results of the backward overwrite operands that are not read again, and operators that free memory run first.",
    "bitwise",
    "nothing; backend 'inductor' does it by itself",
    default=True,
    tried_by="every plan",
)
MICROBATCH = Lever(
    "microbatch",
    "TrainStep splits a batch that does not fit otherwise into smaller ones, unless the model has batch normalisation.",
    "rounding",
    "smaller kernels, and dropout draws different random numbers; for TrainStep only",
    default=True,
    tried_by="TrainStep",
)
OFFLOAD_ACTIVATIONS = Lever(
    "offload_activations",
    "Saved activations are copied to pinned host memory in the forward, and back in the backward.",
    "bitwise",
    "host memory, and waiting for copies that compute does not hide; not on a CPU",
    default=True,
    tried_by="the solver",
)
OFFLOAD_PARAMETERS = Lever(
    "offload_parameters",
    "Frozen parameters are held in pinned host memory, and copied to the device before each use.",
    "bitwise",
    "host memory, and waiting for copies that compute does not hide; for forwards without graph breaks and backend "
    "'aten'; not on a CPU",
    tried_by="the solver",
)
EXPANDABLE_SEGMENTS = Lever(
    "expandable_segments",
    "torch's CUDA allocator uses expandable segments, with which it leaves fewer holes between blocks.",
    "bitwise",
    "a setting of the whole process, which stays; not beside a `torch.cuda.MemPool`, such as vLLM's; not on a CPU",
    default=True,
    tried_by="the search, where a plan with ordinary segments does not fit or adds more time",
)
SEGMENTS_NOTE = (
    "torch's allocator uses expandable segments from the first planned step on, for the whole process, since it then "
    f"leaves fewer holes between blocks; without {EXPANDABLE_SEGMENTS.name!r} in allow it keeps ordinary ones"
)
PLAIN = Lever(
    "plain",
    "A model whose forward cannot be captured runs as it is, without a plan.",
    "bitwise",
    "the budget is not held",
    tried_by="a call that cannot be captured",
)


def offload_link(card: Hardware, allow: Collection[str]) -> Link | None:
    """Returns the card's link to the host's memory. None where the device has no such link, as a CPU, or `allow`
    names no lever that uses it."""
    link = card.link
    used = {OFFLOAD_ACTIVATIONS.name, OFFLOAD_PARAMETERS.name}.intersection(allow)
    return link if used and link.bytes_per_second > 0 else None


def may_expand(allow: Collection[str]) -> bool:
    """Whether a plan may turn expandable segments on: `allow` has the lever, they are not in use yet, and the
    environment (`PYTORCH_CUDA_ALLOC_CONF`) does not turn them off."""
    return EXPANDABLE_SEGMENTS.name in allow and may_turn_on_expandable_segments()
