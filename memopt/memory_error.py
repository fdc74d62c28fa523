"""The error for a device that has no memory left in a step that was planned to fit."""

from __future__ import annotations

import torch


class StepMemoryError(torch.OutOfMemoryError):
    """The device had no memory left in a step that was planned to fit; also a `torch.OutOfMemoryError`.

    Attributes:
        undone: whether gradients, buffers and random generators are as they were before the call.
        repeated: whether the call was tried once more by a tighter plan.
    """

    def __init__(self, message: str, *, undone: bool) -> None:
        super().__init__(message)
        self.undone, self.repeated = undone, False
