"""Plain FSDP2 to set beside memopt: its exchanges by gloo hold no memory once they return, and gathers are counted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from memopt.compat.settled_gloo import gather_of, settle


def settled(model: nn.Module) -> None:
    """Have a plain model exchange as memopt has one that it plans, so that peaks do not depend on gloo's threads."""
    settle(model)


def counted(model: nn.Module) -> list[None]:
    """Have all parts of a model count their gathers; returns a list that grows by one with each of them."""
    settle(model)
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
