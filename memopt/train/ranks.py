"""The step under `DistributedDataParallel`: gradients are averaged once per effective batch, tokens over all ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def is_parallel(model: nn.Module) -> bool:
    """Whether the model is wrapped in `DistributedDataParallel`."""
    return isinstance(model, DistributedDataParallel)


def gradients_kept_here(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which backwards do not exchange gradients (`no_sync`); the next backward outside exchanges their
    sum."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def mean_over_ranks(values: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The mean of each element of `values` over the ranks that train `model`; `values` themselves if there is only
    one."""
    if not isinstance(model, DistributedDataParallel):
        return values
    total = values.clone()
    distributed.all_reduce(total, group=model.process_group)
    return total / distributed.get_world_size(model.process_group)
