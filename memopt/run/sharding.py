"""Models whose parameters are distributed over ranks: which of them can be planned."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from memopt.compat.subclasses import is_sharded


def check_sharding(model: nn.Module) -> None:
    """Raise `ValueError` for a model that is sharded otherwise than by `fully_shard`."""
    name = type(model).__name__
    modules = list(model.modules())
    if any(isinstance(module, FullyShardedDataParallel) for module in modules):
        raise ValueError(
            f"{name} is sharded by FullyShardedDataParallel, which memopt does not plan; shard it by "
            "torch.distributed.fsdp.fully_shard, and then call memopt.optimize"
        )
    sharded = any(map(is_sharded, model.parameters()))
    if sharded and not any(isinstance(module, FSDPModule) for module in modules):
        raise ValueError(
            f"{name} has parameters that are split over ranks as by parallelize_module (tensor parallelism), which "
            "memopt does not plan yet; use fully_shard or DistributedDataParallel instead"
        )
