"""The private functions that Dynamo writes as calls in its graphs."""

from __future__ import annotations

from typing import Any

import torch

from passes.compat import private

PRIVATE_NAMES = (
    *private("torch._C", "_set_grad_enabled"),
    *private("torch.amp.autocast_mode", "_enter_autocast", "_exit_autocast"),
    *private("torch._C._autograd", "_get_data_attr"),
)

__all__ = ["enters_autocast", "is_checkpoint", "is_nested_region", "leaves_autocast", "reads_data", "sets_grad_mode"]


def sets_grad_mode(target: Any) -> bool:
    """Whether a node's target is `torch.set_grad_enabled`."""
    return target is torch._C._set_grad_enabled


def enters_autocast(target: Any) -> bool:
    """Whether a node's target opens a `torch.autocast` block."""
    return target is torch.amp.autocast_mode._enter_autocast


def leaves_autocast(target: Any) -> bool:
    """Whether a node's target closes a `torch.autocast` block."""
    return target is torch.amp.autocast_mode._exit_autocast


def reads_data(target: Any) -> bool:
    """Whether a node's target is the attribute `data` of a tensor."""
    return target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


def is_checkpoint(target: Any) -> bool:
    """Whether a node's target is `torch.utils.checkpoint.checkpoint`."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


def is_nested_region(target: Any) -> bool:
    """Whether a node's target calls a function under `torch.compiler.nested_compile_region`."""
    return target is torch.ops.higher_order.invoke_subgraph
