"""The step under `DistributedDataParallel` and FSDP2: gradients are averaged over ranks, tokens counted over all of
them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from memopt.capture.dynamo_graph import is_tensor_parallel
from memopt.compat.subclasses import is_sharded


def groups_of(model: nn.Module) -> list[Any]:
    """The process groups whose ranks train the model: one, or, where parameters are spread over a mesh of several
    dimensions, one for each of these; none for a model on one device."""
    if isinstance(model, DistributedDataParallel):
        return [model.process_group]
    sharded: Any = next(filter(is_sharded, model.parameters()), None)
    return [] if sharded is None else list(sharded.device_mesh.get_all_groups())


def check_split(model: nn.Module) -> None:
    """Raise `ValueError` for a model that `parallelize_module` has split: torch neither clips nor scales gradients of
    which some are sharded and others are not."""
    if is_tensor_parallel(model):
        raise ValueError(
            f"TrainStep does not train {type(model).__name__}, which is split by parallelize_module (tensor "
            "parallelism); call its loss.backward() and optimizer.step() yourself, planned by memopt.optimize"
        )


def is_parallel(model: nn.Module) -> bool:
    """Whether the model is trained by several ranks: it is in `DistributedDataParallel`, or its parameters are
    sharded."""
    return bool(groups_of(model))


def gradients_kept_here(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which backwards do not exchange gradients (`no_sync`); the next backward outside exchanges their
    sum. Sharded parameters have their gradients exchanged by every backward, since keeping them would take whole
    ones."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def mean_over_ranks(values: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The mean of each element of `values` over the ranks that train `model`; `values` themselves if there is only
    one."""
    for group in groups_of(model):
        total = values.clone()
        distributed.all_reduce(total, group=group)
        values = total / distributed.get_world_size(group)
    return values
