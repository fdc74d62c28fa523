"""Exchanges of FSDP2 by gloo that hold no memory once they return.

gloo's threads drop their references to the tensors of an exchange some time after it is over, and with them, by chance,
the last one: the memory is then freed late, by a thread that no profiler of this one sees. A step would hold more than
was planned by up to two exchanges, or seem to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from memopt.compat.fsdp import groups_of
from memopt.compat.host import HOST
from memopt.compat.storages import users_of
from passes.compat import private

PRIVATE_NAMES = (
    *private(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup._all_gather_process_group",
        needed=False,
    ),
)

__all__ = ["gather_of", "leave", "reduce_scatter", "settle", "settling"]

LONGEST_S = 1.0
"""How long an exchange waits for gloo's threads at most."""


def settle(model: nn.Module) -> None:
    """Have the parts of a model that `fully_shard` was applied to, and that exchange by gloo in FSDP2's own way, wait
    for gloo's threads after each exchange."""
    for group in groups_of(model):
        if group.device.type == HOST.type and "gloo" in str(distributed.get_backend(group._all_gather_process_group)):
            gather, reduce = group._all_gather_comm, group._reduce_scatter_comm
            if type(gather).__name__ == "DefaultAllGather":
                group._all_gather_comm = _Gather(gather)
            if type(reduce).__name__ == "DefaultReduceScatter":
                group._reduce_scatter_comm = _Reduce(reduce)


def leave(model: nn.Module) -> None:
    """Have all parts exchange as before `settle`."""
    for group in groups_of(model):
        if isinstance(group._all_gather_comm, _Gather):
            group._all_gather_comm = group._all_gather_comm.usual
        if isinstance(group._reduce_scatter_comm, _Reduce):
            group._reduce_scatter_comm = group._reduce_scatter_comm.usual


def gather_of(module: nn.Module) -> Any:
    """The function by which a part of a model that `fully_shard` was applied to gathers its own parameters."""
    return groups_of(module, recurse=False)[0]._all_gather_comm


class _Gather:
    """FSDP2's own all-gather, and a wait for gloo's threads."""

    def __init__(self, usual: Any) -> None:
        self.usual, self.allocate = usual, usual.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        with settling(output_tensor), settling(input_tensor):
            self.usual(output_tensor, input_tensor, group=group, async_op=False)


class _Reduce:
    """FSDP2's reduce-scatter by `reduce_scatter`."""

    def __init__(self, usual: Any) -> None:
        self.usual, self.allocate = usual, usual.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        reduce_scatter(output_tensor, input_tensor, group, op)


def reduce_scatter(output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any) -> None:
    """Write this rank's part of the reduced input to the output, both of one dimension: as gloo's own reduce-scatter,
    which reduces a copy of the whole input, but this thread holds the copy."""
    copy = input_tensor.clone()
    with settling(copy):
        distributed.all_reduce(copy, op, group=group)
    output_tensor.copy_(copy.view(distributed.get_world_size(group), -1)[distributed.get_rank(group)])


@contextmanager
def settling(tensor: torch.Tensor) -> Iterator[None]:
    """A block after which the tensor has no more users than before it; waits for them to let it go."""
    users = _users(tensor)
    yield
    latest = time.monotonic() + LONGEST_S
    while _users(tensor) > users and time.monotonic() < latest:
        time.sleep(1e-5)


def _users(tensor: torch.Tensor) -> int:
    """Everything that refers to a tensor. C++ has a reference from Python, too, which a thread drops last."""
    return users_of(tensor) + sys.getrefcount(tensor)
