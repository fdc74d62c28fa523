"""Loss scaling by `torch.amp.GradScaler` for several optimizers, of which all step or none; also used without fp16.
Also `StepResult`, which a call of `TrainStep` returns, and `FollowUp`, which steps the schedulers once that is
known."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memopt.compat.host import is_on_host
from memopt.compat.modules import nonfinite_flags, skips_on_device
from memopt.run.hosted import home_device
from memopt.run.session import session_of


class _Verdict:
    """Whether an effective batch was skipped: a bool on the host, or a tensor (1 for skipped) on a device."""

    def __init__(self, skipped: bool | torch.Tensor) -> None:
        self._flag, self._arrived = skipped, None
        if isinstance(skipped, torch.Tensor) and skipped.is_cuda:
            # Copied right after the step's own work, so that reading it later waits for that step and not for later
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
        """Whether the batch was skipped; waits for the device if necessary."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._flag)


@dataclass(frozen=True)
class StepResult:
    """The result of one `TrainStep` call. Its tensors are 0-dimensional, detached and on the model's device; `float(…)`
    of one waits until the device has computed it."""

    loss: torch.Tensor
    """The mean loss over the tokens (or samples) of the effective batch, up to and including this call."""
    scale: torch.Tensor
    """The factor by which the loss was multiplied for this call's backward; 1 without loss scaling."""
    grad_norm: torch.Tensor | None = None
    """The total norm of all gradients, unscaled and before clipping; None where the effective batch is not complete."""
    verdict: _Verdict | None = None
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
        """Whether the optimizers stepped in this call."""
        return self.verdict is not None and not self.verdict.skipped

    def __str__(self) -> str:
        if self.grad_norm is None:
            return f"loss {self.loss:.4g}, the effective batch is not complete yet"
        done = "skipped" if self.skipped else "stepped"
        return f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}, scale {self.scale:.6g}, {done}"


class Scaling:
    """Scales losses, unscales gradients, and steps the optimizers only if all gradients and the loss are finite. A
    given scaler adapts its scale. Without one, a `GradScaler` with the constant scale 1 does the same checks, and the
    numbers are bitwise those without a scaler. The cost is a pass over the gradients and, for optimizers that are not
    fused, one flag that the host reads from the device in each step; fused ones read it on the device."""

    def __init__(self, scaler: torch.amp.GradScaler | None, device: torch.device) -> None:
        self.adapts = scaler is not None and scaler.is_enabled()
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1.0) if scaler is None or not self.adapts else scaler
        self._unscaled = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss)

    def current(self, device: torch.device) -> torch.Tensor:
        """The loss scale, as a tensor on the device."""
        return self.scaler.scale(torch.ones((), device=device))

    def unscale(self, optimizers: Sequence[torch.optim.Optimizer], finite: torch.Tensor) -> torch.Tensor:
        """Divide the gradients by the scale. Returns a tensor on the device: 1.0 if the step is to be skipped, as
        `finite` is false (the loss is not finite) or any gradient of any optimizer is not, since the gradients of all
        are clipped by one norm; else 0.0. A `GradScaler` decides for each optimizer alone."""
        self._unscaled = True
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)
        flags = [nonfinite_flags(self.scaler, optimizer) for optimizer in optimizers]
        skipped = (~finite).float()
        for flag in (flag for of_optimizer in flags for flag in of_optimizer):
            skipped = torch.maximum(skipped, flag.to(skipped.device, non_blocking=True))
        for first, *others in flags:
            first.copy_(skipped)
            for flag in others:  # on other devices: GradScaler adds up all flags, and fused kernels test for exactly 1
                flag.zero_()
        return skipped

    def step(self, optimizers: Sequence[torch.optim.Optimizer], skipped: torch.Tensor) -> _Verdict:
        """Step all optimizers, or none if `skipped`, the result of `unscale`, is 1.0. Returns a verdict that says
        whether they were skipped; to read it may wait for the device."""
        ran = [_runs(self.scaler, optimizer) for optimizer in optimizers]
        if all(map(skips_on_device, optimizers)):
            return _Verdict(skipped)
        return _Verdict(not all(ran))

    def update(self) -> None:
        """Adapt the scale; to be called once per effective batch."""
        self.scaler.update(None if self.adapts else 1.0)
        self._unscaled = False

    def forget(self) -> None:
        """After an error, make the scaler ready for the next batch, without a change of the scale. Does nothing unless
        the error came between `unscale` and `update`."""
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
                "either call it outside of torch.autocast and give TrainStep autocast=torch.float16, which then scales "
                "the loss, or give it scaler=torch.amp.GradScaler()"
            )


def scaler_for(model: nn.Module, autocast: torch.dtype | None) -> torch.amp.GradScaler | None:
    """A new scaler if the forward computes in fp16, where small gradients would vanish; else None."""
    planned = session_of(model)
    needed = autocast is torch.float16 or (planned is not None and planned.low is torch.float16)
    return torch.amp.GradScaler(home_device(model).type) if needed else None


def check_scaler(scaler: Any) -> None:
    """Raise `TypeError` for a scaler that is neither a `GradScaler` nor None."""
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"scaler must be a torch.amp.GradScaler, or None for the one that the precision needs, not {scaler!r}"
        )


def check_autocast(autocast: Any, model: nn.Module) -> None:
    """Raise `ValueError` for a dtype other than float16, bfloat16 and None; also for any dtype if the model is
    optimised, which has a precision of its own."""
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"autocast must be torch.float16, torch.bfloat16 or None, not {autocast!r}")
    if autocast is not None and session_of(model) is not None:
        raise ValueError(f"autocast={autocast} is for plain models; give memopt.optimize a precision instead")


def _runs(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Step the optimizer by the scaler. Returns whether the optimizer's `step` ran, which `GradScaler.step` does not
    report; that of a fused optimizer always runs, and may skip the update inside."""
    ran: list[bool] = []
    handle = optimizer.register_step_post_hook(lambda *_: ran.append(True))
    try:
        scaler.step(optimizer)
    finally:
        handle.remove()
    return bool(ran)


class FollowUp:
    """Steps the schedulers for each effective batch for which the optimizers have stepped, and warns at the first one
    that was skipped for another reason than the loss scale; by `settle`, where the host does not know yet which."""

    def __init__(self, schedulers: Sequence[Any], scale_adapts: bool) -> None:
        self.schedulers, self.scale_adapts = schedulers, scale_adapts
        self._waiting: tuple[int, StepResult] | None = None
        self._warned = False

    def take(self, number: int, result: StepResult) -> None:
        """Store the result of effective batch `number`. If the host already knows whether it was skipped, step the
        schedulers or warn now; else `settle` does so."""
        self._waiting = number, result
        if result.verdict is not None and result.verdict.on_host:
            self.settle()

    def settle(self) -> None:
        """Step the schedulers, or warn, for the result that `take` stored last; does nothing if that was done already.
        Waits for the device if the host does not know yet whether the optimizers were skipped."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        number, result = waiting
        if not result.skipped:
            for scheduler in self.schedulers:
                scheduler.step()
        elif not self._warned:
            self._warn(number, float(result.loss))

    def forget(self) -> None:
        """Drop the result that `take` stored last, unless `settle` has used it: no scheduler steps for it."""
        self._waiting = None

    def _warn(self, number: int, loss: float) -> None:
        finite = abs(loss) < float("inf")
        if finite and self.scale_adapts:
            return  # a smaller scale will avoid it
        self._warned = True
        reason = f"its loss is {loss:g}" + (", but not all of its gradients are finite" if finite else "")
        warnings.warn(
            f"step {number} was skipped: {reason}; nothing was stepped, and later steps like it are only "
            "marked as skipped in their results",
            RuntimeWarning,
            stacklevel=2,
        )
