"""The result of a call of `TrainStep`; nothing is read from the device until a value is used."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from memopt.compat.host import is_on_host


class Verdict:
    """Whether an effective batch was skipped: a bool on the host, or a tensor (1 for skipped) that is still on a
    device."""

    def __init__(self, skipped: bool | torch.Tensor) -> None:
        self._flag, self._arrived = skipped, None
        if isinstance(skipped, torch.Tensor) and skipped.is_cuda:
            # Copied right behind the step's own work, so that reading it later waits for that step and for no later
            # work.
            self._flag = torch.empty((), dtype=skipped.dtype, pin_memory=True)
            self._flag.copy_(skipped, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    @property
    def on_host(self) -> bool:
        """Whether `skipped` can be read without waiting for a device."""
        return self._arrived is None and (isinstance(self._flag, bool) or is_on_host(self._flag))

    @cached_property
    def skipped(self) -> bool:
        """Whether it was skipped; waits for the device if necessary."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)


@dataclass(frozen=True)
class StepResult:
    """The figures of a call. Tensors are 0-dimensional, detached and on the model's device; `float(…)` waits for it."""

    loss: torch.Tensor
    """The mean loss over the tokens (or samples) of the effective batch so far."""
    scale: torch.Tensor
    """The factor by which the loss was multiplied for this call's backward; 1 without loss scaling."""
    grad_norm: torch.Tensor | None = None
    """The total norm of all gradients, unscaled and before clipping; None where the effective batch is not complete."""
    verdict: Verdict | None = None
    """Whether the batch was skipped; None where the effective batch is not complete."""

    @property
    def complete(self) -> bool:
        """Whether this call completed an effective batch."""
        return self.verdict is not None

    @property
    def skipped(self) -> bool:
        """Whether the effective batch is complete but changed nothing, because its loss or a gradient is not finite."""
        return self.verdict is not None and self.verdict.skipped

    @property
    def stepped(self) -> bool:
        """Whether the optimisers stepped in this call."""
        return self.verdict is not None and not self.verdict.skipped

    def __str__(self) -> str:
        if self.grad_norm is None:
            return f"loss {self.loss:.4g}, the effective batch goes on"
        done = "skipped" if self.skipped else "stepped"
        return f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}, scale {self.scale:.6g}, {done}"
