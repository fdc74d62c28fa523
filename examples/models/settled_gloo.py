"""Plain training on several ranks to set beside memopt: exchanges by gloo hold no memory once they return, and are
counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule

from memopt.compat.exchanges import gather_of, reduce_scatter, settle_gloo, settling


def settled(model: nn.Module) -> None:
    """Have a plain model exchange as memopt has one that it plans, so that peaks do not depend on gloo's threads."""
    settle_gloo(model)


def counted(model: nn.Module) -> list[None]:
    """Have all parts of a model count their gathers; returns a list that grows by one with each of them."""
    settle_gloo(model)
    calls: list[None] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_Counted(gather_of(module), calls))
    return calls


class _Counted:
    """An all-gather that counts its calls."""

    def __init__(self, gather: Any, calls: list[None]) -> None:
        self.gather, self.allocate, self.calls = gather, gather.allocate, calls

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls.append(None)
        return self.gather(output_tensor, input_tensor, group=group, async_op=async_op)


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
        with settling(summed):
            distributed.all_reduce(summed, _OPERATIONS[op], group=self.group)
        return summed

    def all_gather_into_tensor(self, value: Tensor, ranks: int, group_name: str) -> Tensor:
        self.calls.append("all_gather")
        gathered = value.new_empty((ranks * value.shape[0], *value.shape[1:]))
        torch.empty_like(gathered)
        own = value.contiguous().view(-1)
        pieces = gathered.view(ranks, -1).unbind()
        pieces[distributed.get_rank(self.group)].copy_(own)
        for rank, piece in enumerate(pieces):
            with settling(piece):
                distributed.broadcast(piece, group=self.group, group_src=rank)
        return gathered

    def reduce_scatter_tensor(self, value: Tensor, op: str, ranks: int, group_name: str) -> Tensor:
        self.calls.append("reduce_scatter")
        own = value.new_empty((value.shape[0] // ranks, *value.shape[1:]))
        reduce_scatter(own.view(-1), value.contiguous().view(-1), self.group, _OPERATIONS[op])
        return own

    def wait_tensor(self, value: Tensor) -> Tensor:
        return value


_OPERATIONS = {"sum": distributed.ReduceOp.SUM, "avg": distributed.ReduceOp.AVG}
