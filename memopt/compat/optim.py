"""Optimizers and gradient scalers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from memopt.compat.fakes import FakeTensor
from passes.private import private

PRIVATE_NAMES = (
    *private("torch.amp", "GradScaler._found_inf_per_device", call="self, optimizer"),
    *private("torch.optim.optimizer", "_foreach_supported_types"),
    *private("torch.optim.optimizer", "_get_foreach_kernels_supported_devices", call=""),
    *private("torch.compiler", "_is_compiling_flag"),
)

__all__ = ["eager_optimizers", "nonfinite_flags", "skips_on_device"]


def nonfinite_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags that `scaler.unscale_(optimizer)` set: a scalar tensor for each device, 1 if a gradient is not finite.

    These are the tensors from which `scaler.step(optimizer)` decides whether to step and `scaler.update()` the scale.
    """
    return list(scaler._found_inf_per_device(optimizer).values())


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own kernel skips a step with gradients that are not finite, as with `fused=True`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


@contextmanager
def eager_optimizers(*, foreach: bool) -> Iterator[None]:
    """Context in which torch's optimizers make the choices of an eager run although they are given fake tensors.

    They treat fake tensors as plain ones, and do not notice that something is being compiled around them. With
    `foreach`, their default on the CPU is the foreach implementation, as it is on a GPU.
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
