"""The last stage of a pipeline: its module and its loss are one planned region, though schedules call them apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.run.loss import batch_loss
from memopt.run.session import session_of


class UntilTarget(nn.Module):
    """The last stage, whose training calls wait for the target: its module and its loss are one planned region then.

    Until that is so, and where the schedule evaluates, it is the plain stage.
    """

    def __init__(self, stage: Any, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module, self.loss_fn = stage.submod, loss_fn
        self._stage = stage
        self._given: tuple[torch.Tensor, ...] | None = None

    def forward(self, *args: torch.Tensor) -> Any:
        """What the module returns; in training a stand-in, which the schedule hands on to `loss`."""
        if session_of(self.module) is None or not (self._stage.has_backward and torch.is_grad_enabled()):
            return self.module(*args)
        self._given = args
        return args[0].view_as(args[0])

    def loss(self, output: Any, target: Any, **further: Any) -> Any:
        """The loss of a microbatch."""
        given, self._given = self._given, None
        if given is None:
            assert self.loss_fn is not None
            return self.loss_fn(output, target, **further)
        return batch_loss(self.module, (given, target), None)
