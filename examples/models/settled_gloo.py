"""Exchanges of FSDP2 by gloo that hold no memory once they return, so that measured peaks do not depend on threads.

gloo's worker threads drop their references to an exchange's tensors, and to its own buffers, some time after it is
over. A buffer that is freed there is freed late, and `measure_peak`, which sees one thread, counts it to the end. Here
gloo is given only tensors that this thread holds longer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from memopt.compat.storages import users_of


def settled(model: nn.Module) -> None:
    """Have all parts of a model that `fully_shard` was applied to exchange by `SettledGather` and `SettledReduce`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(SettledGather())
            module.set_custom_reduce_scatter(SettledReduce())


def counted(model: nn.Module) -> list[None]:
    """Have all parts of such a model gather by `SettledGather`; returns a list that grows by one with every gather."""
    calls: list[None] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(SettledGather(calls))
    return calls


class _Settled:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer for an exchange, as FSDP2 makes it by default."""
        return torch.empty(*size, dtype=dtype, device=device)


class SettledGather(_Settled):
    """An all-gather by one broadcast from each rank, with a copy of the result as gloo's own makes, that returns when
    gloo has dropped its references."""

    def __init__(self, calls: list[None] | None = None) -> None:
        self.calls = [] if calls is None else calls
        """One entry for each call."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self.calls.append(None)
        torch.empty_like(output_tensor)
        pieces = output_tensor.view(distributed.get_world_size(group), -1).unbind()
        own = pieces[distributed.get_rank(group)]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        for rank, piece in enumerate(pieces):
            with _settling(piece):
                distributed.broadcast(piece, group=group, group_src=rank)


class SettledReduce(_Settled):
    """A reduce-scatter as gloo's own, by reducing a copy of the whole input, that returns when gloo has dropped its
    references."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        copy = input_tensor.clone()
        with _settling(copy):
            distributed.all_reduce(copy, op, group=group)
        output_tensor.copy_(copy.view(distributed.get_world_size(group), -1)[distributed.get_rank(group)])


@contextmanager
def _settling(tensor: Tensor) -> Iterator[None]:
    """A block after which the tensor has no more users than before it; waits for them to let it go."""
    users = _users(tensor)
    yield
    while _users(tensor) > users:
        time.sleep(0)


def _users(tensor: Tensor) -> int:
    """Everything that refers to a tensor. C++ has a reference from Python, too, which a thread drops last."""
    return users_of(tensor) + sys.getrefcount(tensor)


class SettledCollectives:
    """The functional collectives of a group, which tensor parallelism exchanges by, as kernels for the CPU that return
    when gloo has dropped its references. They allocate what gloo's own do: a gather a second buffer for its result, a
    reduce-scatter one for its input. They hold from their making to the end of the process."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: list[str] = []
        """The name of each collective that was called."""
        self._library = torch.library.Library("_c10d_functional", "IMPL")
        for kernel in (self.all_reduce, self.all_gather_into_tensor, self.reduce_scatter_tensor, self.wait_tensor):
            self._library.impl(kernel.__name__, kernel, "CPU")

    def all_reduce(self, value: Tensor, op: str, group_name: str) -> Tensor:
        self.calls.append("all_reduce")
        summed = value.clone(memory_format=torch.contiguous_format)
        with _settling(summed):
            distributed.all_reduce(summed, _OPERATIONS[op], group=self.group)
        return summed

    def all_gather_into_tensor(self, value: Tensor, ranks: int, group_name: str) -> Tensor:
        self.calls.append("all_gather")
        gathered = value.new_empty((ranks * value.shape[0], *value.shape[1:]))
        SettledGather()(gathered, value.contiguous().view(-1), self.group)
        return gathered

    def reduce_scatter_tensor(self, value: Tensor, op: str, ranks: int, group_name: str) -> Tensor:
        self.calls.append("reduce_scatter")
        own = value.new_empty((value.shape[0] // ranks, *value.shape[1:]))
        SettledReduce()(own.view(-1), value.contiguous().view(-1), self.group, _OPERATIONS[op])
        return own

    def wait_tensor(self, value: Tensor) -> Tensor:
        return value


_OPERATIONS = {"sum": distributed.ReduceOp.SUM, "avg": distributed.ReduceOp.AVG}
