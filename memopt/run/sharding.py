"""Models whose parameters are distributed over ranks: which of them can be planned."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from memopt.compat.subclasses import is_sharded


def check_sharding(model: nn.Module) -> None:
    """Raise `ValueError` for a model that is sharded otherwise than by `fully_shard`."""
    name = type(model).__name__
    # It takes a second to import; whoever shards by it has done so.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    modules = list(model.modules())
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        raise ValueError(
            f"{name} is sharded by FullyShardedDataParallel, which memopt does not plan; shard it by "
            "torch.distributed.fsdp.fully_shard, and then call memopt.optimize"
        )
    sharded = any(map(is_sharded, model.parameters()))
    if sharded and (fsdp is None or not any(isinstance(module, fsdp.FSDPModule) for module in modules)):
        raise ValueError(
            f"{name} has parameters that are split over ranks as by parallelize_module (tensor parallelism), which "
            "memopt does not plan yet; use fully_shard or DistributedDataParallel instead"
        )
