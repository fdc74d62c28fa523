"""FSDP2 (`fully_shard`): the groups of parameters that are gathered together, and how they exchange.

Private names, in torch 2.11 to 2.15: `FSDPModule._get_fsdp_state`; of the state `_fsdp_param_group` (2.11),
`_fsdp_param_groups` (from 2.13) and `_state_ctx`; of a group `_all_gather_comm`, `_reduce_scatter_comm`,
`_partial_reduce_output` and `_reset_iter_state` (from 2.13).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["groups_of", "is_fully_sharded", "sharding_in_words", "without_exchange"]


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model or a part of it."""
    # Importing it takes a second; whoever shards by it has done so.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of parameters (`FSDPParamGroup`) of all its parts, in the order of its modules."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            anything: Any = module
            state = anything._get_fsdp_state()
            one = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if one is None else one
            found |= {id(group): group for group in groups if group is not None}
    return list(found.values())


def sharding_in_words(model: nn.Module) -> str:
    """What has to be equal on all ranks for their collectives to match: the groups, and what each of them exchanges."""
    groups = groups_of(model)
    facts = [
        (
            [tuple(parameter.sharded_param.shape) for parameter in group.fsdp_params],
            group.post_forward_mesh_info is not None,
            str(group.mp_policy),
        )
        for group in groups
    ]
    return f"{len(groups)} groups of parameters" + (f" ({_digest(facts)})" if facts else "")


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


class _OwnGather:
    """An all-gather that fills the places of all ranks with this rank's shard, and asks no other rank."""

    def __init__(self, usual: Any) -> None:
        self.allocate = usual.allocate

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        for place in output_tensor.view(-1, input_tensor.numel()):
            if place.data_ptr() != input_tensor.data_ptr():
                place.copy_(input_tensor)


class _OwnReduce:
    """A reduce-scatter that returns this rank's own first part."""

    def __init__(self, usual: Any) -> None:
        self.allocate = usual.allocate

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        output_tensor.copy_(input_tensor[: output_tensor.numel()])


@contextmanager
def without_exchange(model: nn.Module) -> Iterator[None]:
    """A block in which the model's parts gather and reduce as they always do, with buffers of the same sizes, but with
    no other rank: what runs in it need not run on all of them. Values that are gathered repeat this rank's shard."""
    with ExitStack() as stack:
        for group in groups_of(model):
            stack.enter_context(_set(group, "_all_gather_comm", _OwnGather(group._all_gather_comm)))
            stack.enter_context(_set(group, "_reduce_scatter_comm", _OwnReduce(group._reduce_scatter_comm)))
            stack.enter_context(_set(group, "all_reduce_grads", False))
            stack.enter_context(_set(group, "_partial_reduce_output", None))
        yield


@contextmanager
def _set(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
