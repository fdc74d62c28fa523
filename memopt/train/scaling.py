"""`torch.amp.GradScaler` for several optimisers, which all step or all skip; it also guards steps without fp16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memopt.compat.modules import nonfinite_flags, skips_on_device
from memopt.run.session import session_of
from memopt.train.step_result import Verdict


class Scaling:
    """Scales losses, unscales gradients, and steps the optimisers only if all gradients and the loss are finite.

    A given scaler adapts its scale. Without one, a `GradScaler` with the constant scale 1 does the same checks, so that
    a NaN never reaches the parameters; the numbers are bitwise those without a scaler. The cost is a pass over the
    gradients and, for optimisers that are not fused, one flag read from the device in each step; fused ones read it on
    the device.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
        self.adapts = scaler is not None and scaler.is_enabled()
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1.0) if scaler is None or not self.adapts else scaler
        self._unscaled = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss)

    def current(self, device: torch.device) -> torch.Tensor:
        """The scale, on the device."""
        return self.scaler.scale(torch.ones((), device=device))

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer], finite: torch.Tensor) -> torch.Tensor:
        """Divide the gradients by the scale; return a tensor on the device, 1.0 if the step is skipped and else 0.0.

        It is skipped if `finite` is false or any gradient of any optimiser is not finite. GradScaler by itself decides
        for each optimiser alone, but the gradients of all are clipped by one norm, so a NaN in one is in all.
        """
        self._unscaled = True
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        flags = [nonfinite_flags(self.scaler, optimizer) for optimizer in optimizers]
        skipped = (~finite).float()
        for flag in (flag for of_optimizer in flags for flag in of_optimizer):
            skipped = torch.maximum(skipped, flag.to(skipped.device, non_blocking=True))
        for first, *others in flags:
            first.copy_(skipped)
            for flag in others:  # on other devices; GradScaler adds all flags up, and fused kernels test for exactly 1
                flag.zero_()
        return skipped

    def step(self, optimizers: Sequence[torch.optim.Optimizer], skipped: torch.Tensor) -> Verdict:
        """Step all optimisers, or none if `skipped`, the result of `unscale`, says so."""
        ran = [_runs(self.scaler, optimizer) for optimizer in optimizers]
        if all(map(skips_on_device, optimizers)):
            return Verdict(skipped)
        return Verdict(not all(ran))

    def update(self) -> None:
        """Adapt the scale; to be called once per effective batch."""
        self.scaler.update(None if self.adapts else 1.0)
        self._unscaled = False

    def forget(self) -> None:
        """Reset for the next batch after an error, which may have come before `update`; the scale does not change."""
        if self._unscaled:
            self.scaler.update(self.scaler.get_scale())
            self._unscaled = False

    def check_ambient_autocast(self, device: torch.device) -> None:
        """Raise `ValueError` where the caller's own autocast is in fp16 and nothing scales the loss."""
        if self.adapts or not torch.is_autocast_enabled(device.type):
            return
        if torch.get_autocast_dtype(device.type) is torch.float16:
            raise ValueError(
                "the step is called within torch.autocast in float16 without a scaler, where small gradients vanish; "
                "call it outside and give it autocast=torch.float16, or a scaler"
            )


def scaler_for(model: nn.Module, autocast: torch.dtype | None) -> torch.amp.GradScaler | None:
    """A new scaler if the forward computes in fp16, where small gradients would vanish; else None."""
    planned = session_of(model)
    needed = autocast is torch.float16 or (planned is not None and planned.low is torch.float16)
    return torch.amp.GradScaler(next(model.parameters()).device.type) if needed else None


def check_scaler(scaler: Any) -> None:
    """Raise `TypeError` for an object that is neither a `GradScaler` nor None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"scaler must be a torch.amp.GradScaler, or None for the one that the precision needs, not {scaler!r}"
        )


def check_autocast(autocast: Any, model: nn.Module) -> None:
    """Raise `ValueError` for a dtype that autocast does not support, or for an optimised model, which has its
    precision."""
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be torch.float16, torch.bfloat16 or None, not {autocast!r}")
    if autocast is not None and session_of(model) is not None:
        raise ValueError(f"autocast={autocast} is for plain models; give memopt.optimize a precision instead")


def _runs(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Let the scaler step the optimiser, and return whether its `step` ran.

    A fused optimiser's always runs, and may skip inside. `GradScaler.step` does not tell: it returns None either way.
    """
    ran: list[bool] = []
    handle = optimizer.register_step_post_hook(lambda *_: ran.append(True))
    try:
        scaler.step(optimizer)
    finally:
        handle.remove()
    return bool(ran)
