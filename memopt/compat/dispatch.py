"""Torch function and dispatch modes, autocast, and kernels by dispatch key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "TorchDispatchMode",
    "autocast_kernel",
    "composite_kernel",
    "plain_tensors",
    "without_autocast",
    "without_torch_functions",
]


def plain_tensors() -> ExitStack:
    """Context in which tensors answer for themselves: no torch function or dispatch mode, no subclass override."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunctionSubclass())
    stack.enter_context(_disable_current_modes())
    return stack


def without_autocast() -> AbstractContextManager[None]:
    """Autocast off for all devices: a captured graph has its casts in it, and must get no others where it runs."""
    return torch._C._DisableAutocast()


def without_torch_functions() -> AbstractContextManager[None]:
    """Torch functions go straight to their implementation, past modes such as that of tracing."""
    return torch._C.DisableTorchFunction()


def autocast_kernel(operator: Any, device: str) -> Callable[..., Any] | None:
    """What autocast does with an operator on a device type: casts, then the operator; None where it leaves it alone."""
    return _kernel(operator, f"Autocast{device.upper()}")


def composite_kernel(operator: Any) -> Callable[..., Any] | None:
    """The calls that an operator is made of; None for one with a kernel or a gradient of its own."""
    return _kernel(operator, "CompositeImplicitAutograd")


def _kernel(operator: Any, name: str) -> Callable[..., Any] | None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), name):
        return None
    return functools.partial(operator._op_dk, getattr(DispatchKey, name))
