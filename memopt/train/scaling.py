"""`torch.amp.GradScaler` for several optimisers with one verdict for all of them; it also guards steps without fp16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memopt.compat.optim import nonfinite_flags, skips_on_device
from memopt.run.planned_call import planned_call_of
from memopt.train.ranks import unwrapped
from memopt.train.step_result import Verdict


class Scaling:
    """Scales losses, unscales gradients, and lets the optimisers step only if all gradients and the loss are finite.

    A given scaler adapts its scale. Without one, a `GradScaler` whose scale stays 1 does the same checks, so that a
    loss of NaN never reaches the parameters: numbers are bitwise those of no scaler. The price is GradScaler's: a pass
    over the gradients, and for an ordinary optimiser one flag read from the device a step; fused optimisers read it
    there themselves.
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
        """Divide the gradients by the scale; returns 1.0 (on the device) if nothing may step, else 0.0.

        Nothing may if `finite` is false or any gradient of any optimiser is not finite. GradScaler by itself decides
        for each optimiser alone, but one norm clips all of them: a NaN in the gradients of one is then in all.
        """
        self._unscaled = True
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        flags = [nonfinite_flags(self.scaler, optimizer) for optimizer in optimizers]
        skipped = (~finite).float()
        for flag in (flag for each in flags for flag in each):
            skipped = torch.maximum(skipped, flag.to(skipped.device, non_blocking=True))
        for first, *others in flags:
            first.copy_(skipped)
            for flag in others:  # on other devices: GradScaler adds them up, and fused kernels test for exactly 1
                flag.zero_()
        return skipped

    def step(self, optimizers: Sequence[torch.optim.Optimizer], skipped: torch.Tensor) -> Verdict:
        """Step all optimisers or none, as `skipped` from `unscale` says."""
        ran = [_runs(self.scaler, optimizer) for optimizer in optimizers]
        if all(map(skips_on_device, optimizers)):
            return Verdict(skipped)
        return Verdict(not all(ran))

    def update(self) -> None:
        """Adapt the scale, once an effective batch."""
        self.scaler.update(None if self.adapts else 1.0)
        self._unscaled = False

    def forget(self) -> None:
        """Make ready for the next batch after an error, which may have come before `update`; the scale stays."""
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
    """The scaler that the precision of the forward needs: one for fp16, whose small gradients vanish, else None."""
    planned = planned_call_of(unwrapped(model))
    needed = autocast is torch.float16 or (planned is not None and planned.low is torch.float16)
    return torch.amp.GradScaler(next(model.parameters()).device.type) if needed else None


def check_scaler(scaler: Any) -> None:
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"scaler must be a torch.amp.GradScaler, or None for the one that the precision needs, not {scaler!r}"
        )


def check_autocast(autocast: Any, model: nn.Module) -> None:
    """Raise `ValueError` for a dtype that autocast does not run in, or a model that has a precision of its own."""
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be torch.float16, torch.bfloat16 or None, not {autocast!r}")
    if autocast is not None and planned_call_of(unwrapped(model)) is not None:
        raise ValueError(f"autocast={autocast} is for plain models; give memopt.optimize a precision instead")


def _runs(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Let the scaler step the optimiser; whether its `step` ran (a fused one always does, and may skip inside).
    `GradScaler.step` returns what the optimiser does, which is None either way."""
    ran: list[bool] = []
    handle = optimizer.register_step_post_hook(lambda *_: ran.append(True))
    try:
        scaler.step(optimizer)
    finally:
        handle.remove()
    return bool(ran)
