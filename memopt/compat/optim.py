"""Optimizers and gradient scalers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from memopt.compat.fakes import FakeTensor

__all__ = ["eager_optimizers", "nonfinite_flags", "skips_on_device"]


def nonfinite_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What `scaler.unscale_(optimizer)` found, a scalar for each device, 1 where a gradient is not finite: the very
    tensors by which `scaler.step(optimizer)` decides and `scaler.update()` adapts the scale."""
    return list(scaler._found_inf_per_device(optimizer).values())


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a `GradScaler` leaves skipping to the optimiser's own kernel, as with `fused=True`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def eager_optimizers(*, foreach: bool) -> Iterator[None]:
    """Context in which the optimisers of torch treat fake tensors as plain ones, and do not see that something is being
    compiled around them: what they choose (foreach, single numbers on the device) is what they would choose in a run.

    `foreach`: on the CPU too they take all parameters at once by default, as they do on a GPU.
    """
    types: list[Any] = _foreach_supported_types
    compiler: Any = torch.compiler
    module: Any = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it
    devices, compiling = module._get_foreach_kernels_supported_devices, compiler._is_compiling_flag
    types.append(FakeTensor)
    compiler._is_compiling_flag = False
    if foreach:
        module._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = devices
        compiler._is_compiling_flag = compiling
        types.remove(FakeTensor)
