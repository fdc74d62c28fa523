"""Optimizers and gradient scalers.

Private names, in torch 2.11 to 2.15: `GradScaler._found_inf_per_device`, the attribute `_step_supports_amp_scaling` of
optimizers, `torch.optim.optimizer._foreach_supported_types` and `_get_foreach_kernels_supported_devices`,
`torch.compiler._is_compiling_flag`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from memopt.compat.fakes import FakeTensor
from memopt.compat.host import HOST

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
        module._get_foreach_kernels_supported_devices = lambda: [*devices(), HOST.type]
    try:
        yield
    finally:
        module._get_foreach_kernels_supported_devices = devices
        compiler._is_compiling_flag = compiling
        types.remove(FakeTensor)
