"""Optimizers and gradient scalers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types

from memopt.compat.fakes import FakeTensor
from memopt.compat.host import HOST
from passes.compat import private

PRIVATE_NAMES = (
    *private("torch.amp", "GradScaler._found_inf_per_device", call="self, optimizer"),
    *private(
        "torch.optim.optimizer",
        "_foreach_supported_types",
        "_global_optimizer_pre_hooks",
        "_global_optimizer_post_hooks",
    ),
    *private("torch.optim.optimizer", "_get_foreach_kernels_supported_devices", call=""),
    *private("torch.compiler", "_is_compiling_flag"),
)

__all__ = ["eager_optimizers", "nonfinite_flags", "skips_on_device", "wrapped_by_scheduler"]


def nonfinite_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags that `scaler.unscale_(optimizer)` set: a scalar tensor for each device, 1 if a gradient is not finite.

    These are the tensors from which `scaler.step(optimizer)` decides whether to step and `scaler.update()` the scale.
    """
    return list(scaler._found_inf_per_device(optimizer).values())


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own kernel skips a step with gradients that are not finite, as with `fused=True`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def wrapped_by_scheduler(step: Any) -> Any | None:
    """The function of an optimizer's step around which a scheduler has put its own; None for any other value."""
    return getattr(step, "__wrapped__", None) if hasattr(step, "_wrapped_by_lr_sched") else None


@contextmanager
def eager_optimizers(*, foreach: bool) -> Iterator[None]:
    """Context in which torch's optimizers make the choices of an eager run although they are given fake tensors.

    They treat fake tensors as plain ones, and do not notice that something is being compiled around them. Functions
    that the user has compiled run as written, and hooks on the steps of all optimizers are not called. With `foreach`,
    their default on the CPU is the foreach implementation, as it is on a GPU.
    """
    types: list[Any] = _foreach_supported_types
    compiler: Any = torch.compiler
    module: Any = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it
    devices, compiling = module._get_foreach_kernels_supported_devices, compiler._is_compiling_flag
    types.append(FakeTensor)
    compiler._is_compiling_flag = False
    if foreach:
        module._get_foreach_kernels_supported_devices = lambda: [*devices(), HOST.type]
    hooks = module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks
    module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks = {}, {}
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks = hooks
        module._get_foreach_kernels_supported_devices = devices
        compiler._is_compiling_flag = compiling
        types.remove(FakeTensor)
