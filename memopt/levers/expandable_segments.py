"""The lever that turns on expandable segments in torch's CUDA allocator; it is used where no plan without it fits, or
none as fast."""

from __future__ import annotations

from collections.abc import Collection

from memopt.compat.card import may_turn_on_expandable_segments
from memopt.levers.lever import Lever

EXPANDABLE_SEGMENTS = Lever(
    "expandable_segments",
    "torch's CUDA allocator uses expandable segments, with which it leaves fewer holes between blocks.",
    "bitwise",
    "a setting of the whole process, which stays; not beside a `torch.cuda.MemPool`, such as vLLM's; not on a CPU",
    default=True,
    tried_by="the search, where a plan with ordinary segments does not fit or adds more time",
)
NOTE = (
    "torch's allocator uses expandable segments from the first planned step on, for the whole process, since it then "
    f"leaves fewer holes between blocks; without {EXPANDABLE_SEGMENTS.name!r} in allow it keeps ordinary ones"
)


def may_expand(allow: Collection[str]) -> bool:
    """Whether a plan may turn expandable segments on: `allow` has the lever, they are not in use yet, and the
    environment (`PYTORCH_CUDA_ALLOC_CONF`) does not turn them off."""
    return EXPANDABLE_SEGMENTS.name in allow and may_turn_on_expandable_segments()
