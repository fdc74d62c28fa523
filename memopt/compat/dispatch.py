"""The dispatcher: modes, and the kernels of an operator by dispatch key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from passes.compat import private

PRIVATE_NAMES = (
    *private("torch.utils._python_dispatch", "TorchDispatchMode", "_disable_current_modes"),
    *private(
        "torch._C",
        "DisableTorchFunctionSubclass",
        "DisableTorchFunction",
        "_DisableAutocast",
        "DispatchKey",
        "_dispatch_has_kernel_for_dispatch_key",
        "_dispatch_get_registrations_for_dispatch_key",
        "_ForceDispatchKeyGuard",
        "_dispatch_tls_local_include_set",
        "_dispatch_tls_local_exclude_set",
    ),
    *private("torch._ops", "OpOverload._op_dk", needed=False),
)

__all__ = [
    "TorchDispatchMode",
    "autocast_kernel",
    "composite_kernel",
    "cuda_autocast_names",
    "kernels_as_in_eager_mode",
    "plain_tensors",
    "without_autocast",
    "without_torch_functions",
]


def plain_tensors() -> ExitStack:
    """Context without dispatch modes and without the `__torch_function__` of tensor subclasses.

    Torch function modes still act, so that factories see the default device.
    """
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunctionSubclass())
    stack.enter_context(_disable_current_modes())
    return stack


def kernels_as_in_eager_mode() -> AbstractContextManager[None]:
    """Context for the operators that a dispatch mode runs on real values: their kernels see that a tensor is a
    conjugate or a negative. Inside of a mode torch leaves these keys out, and a kernel that makes such views itself
    (`linalg_pinv` of complex numbers) reads their memory as it is, and computes with other values."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(DispatchKey.Conjugate).remove(DispatchKey.Negative)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def without_autocast() -> AbstractContextManager[None]:
    """Context with autocast off for all devices: a captured graph holds its casts and must get no others."""
    return torch._C._DisableAutocast()


def without_torch_functions() -> AbstractContextManager[None]:
    """Context in which torch functions run their implementation and no torch function mode sees them."""
    return torch._C.DisableTorchFunction()


def autocast_kernel(operator: Any, device: str) -> Callable[..., Any] | None:
    """The function by which autocast replaces an operator overload on a device type, which casts and then calls the
    operator; None without a rule."""
    return _kernel(operator, f"Autocast{device.upper()}")


@functools.cache
def cuda_autocast_names() -> frozenset[str]:
    """The names of the ATen operators that autocast has a rule for on CUDA in the installed torch, with a card or not:
    torch 2.13 lists `rms_norm`, torch 2.11 does not."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in registered)


def composite_kernel(operator: Any) -> Callable[..., Any] | None:
    """The decomposition of an operator overload into other operators; None if it has kernels or a derivative."""
    return _kernel(operator, "CompositeImplicitAutograd")


def _kernel(operator: Any, name: str) -> Callable[..., Any] | None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), name):
        return None
    return functools.partial(operator._op_dk, getattr(DispatchKey, name))
