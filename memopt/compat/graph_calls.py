"""The private torch functions that Dynamo writes as calls in its graphs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["enters_autocast", "is_checkpoint", "leaves_autocast", "sets_grad_mode"]


def sets_grad_mode(target: Any) -> bool:
    """Whether a call in Dynamo's graph is `torch.set_grad_enabled`."""
    return target is torch._C._set_grad_enabled


def enters_autocast(target: Any) -> bool:
    """Whether a call in Dynamo's graph opens a `torch.autocast` block."""
    return target is torch.amp.autocast_mode._enter_autocast


def leaves_autocast(target: Any) -> bool:
    """Whether a call in Dynamo's graph closes a `torch.autocast` block."""
    return target is torch.amp.autocast_mode._exit_autocast


def is_checkpoint(target: Any) -> bool:
    """Whether a call in Dynamo's graph is `torch.utils.checkpoint.checkpoint`."""
    return target is torch.ops.higher_order.tag_activation_checkpoint
