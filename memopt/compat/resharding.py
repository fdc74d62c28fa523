"""FSDP2's choice for each block: free its parameters after the forward and gather them again for the backward
(ZeRO-3), or keep them gathered in between (ZeRO-2).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from memopt.compat.fsdp import groups_of
from passes.compat import private

PRIVATE_NAMES = (
    *private(
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "FSDPState._is_root",
        "FSDPState._auto_reshard_after_forward",
        needed=False,
    ),
    *private(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup.post_forward_mesh_info",
        "FSDPParamGroup.mesh_info",
        needed=False,
    ),
    *private("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam._sharded_param_data", needed=False),
)

ALL = sys.maxsize
"""A number of blocks that is larger than any model's."""


@dataclass(frozen=True)
class Block:
    """A part of a model whose parameters FSDP2 gathers together, and frees after its forward unless told otherwise."""

    path: str
    module: Any
    gathered_bytes: int
    """Bytes of its parameters once they are gathered."""


class Resharding:
    """The blocks of a model that `fully_shard` frees after their forward, and how many of the last of them are kept.

    Blocks whose `reshard_after_forward` the user has set to False or to a number of ranks are left as they are. The
    last blocks are the cheapest to keep, since their backward comes first.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.count = 0
        """How many blocks are kept now."""
        self._automatic: list[bool] = []

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in the order of the model's modules. They are known once the model has run a forward, in which
        FSDP2 finds out which part is the root."""
        found: dict[int, Block] = {}
        for path, module in self.model.named_modules():
            groups = groups_of(module, recurse=False)
            if groups and _state(module)._is_root is False and all(map(_frees, groups)):
                # Several modules may be one block: `fully_shard([norm, head])`.
                found.setdefault(id(_state(module)), Block(path, module, sum(map(_gathered_bytes, groups))))
        return tuple(found.values())

    def keep(self, count: int) -> None:
        """Keep the parameters of the last `count` blocks from their forward to their backward, and free the others
        after the forward."""
        if count == self.count:
            return
        if not self._automatic:
            self._automatic = [_state(block.module)._auto_reshard_after_forward for block in self.blocks]
        for number, block in enumerate(reversed(self.blocks)):
            if (number < count) != (number < self.count):
                block.module.set_reshard_after_forward(number >= count, recurse=False)
        self.count = count

    def restore(self) -> None:
        """Leave all blocks to FSDP2, as before the first `keep`."""
        if self.count:
            self.keep(0)
        for block, automatic in zip(self.blocks, self._automatic, strict=True) if self._automatic else ():
            _state(block.module)._auto_reshard_after_forward = automatic
        self._automatic = []

    @property
    def in_use(self) -> tuple[tuple[str, int], ...]:
        """The path and the bytes of each block that is kept now."""
        kept = self.blocks[len(self.blocks) - self.count :] if self.count else ()
        return tuple((block.path, block.gathered_bytes) for block in kept)


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _frees(group: Any) -> bool:
    """Whether a group frees its parameters after the forward and gathers them from all ranks again."""
    after = group.post_forward_mesh_info
    return after is not None and after == group.mesh_info


def _gathered_bytes(group: Any) -> int:
    ranks, computed = group.mesh_info.shard_mesh_size, group.mp_policy.param_dtype
    return sum(
        ranks * parameter._sharded_param_data.numel() * (computed or parameter.sharded_param.dtype).itemsize
        for parameter in group.fsdp_params
    )
