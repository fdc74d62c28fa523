"""The dtype that a policy means on a device, which need not be present."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.rewrite.precision.plan import dtype_name, dtype_of
from memopt.rewrite.precision.rules import DEFAULT

Policy: TypeAlias = "str | Mapping[str, str]"
POLICIES = ("fp32", "bf16", "fp16", "search", "auto")


def check_policy(policy: Policy) -> Policy:
    """Returns the policy. Raises TypeError or ValueError for one that is no known name and no mapping to known
    dtypes."""
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(map(repr, POLICIES))
            raise ValueError(f"precision must be one of {known}, or a dict of rules, not {policy!r}")
        return policy
    if not isinstance(policy, Mapping) or not all(isinstance(part, str) for pair in policy.items() for part in pair):
        raise TypeError(
            "precision must be a name, such as 'bf16', or a dict of dtypes by operator, module or node, such as "
            f"{{'default': 'bf16', 'lm_head': 'fp32'}}, not {policy!r}"
        )
    for pattern, name in policy.items():
        if not (pattern == DEFAULT and name in ("auto", "search")):
            dtype_of(name)
    return policy


def best_dtype(hardware: Hardware, *, cpu_has_bf16: bool | None = None) -> torch.dtype:
    """Returns bf16 where the device computes in it, fp16 where it has only that, else fp32.

    A CPU has bf16 if it has the instructions (AVX512-BF16 or AMX); `cpu_has_bf16` says so for another CPU than this.
    """
    device = device_of(hardware)
    if device.is_host and cpu_has_bf16 is not None:
        return torch.bfloat16 if cpu_has_bf16 else torch.float32
    known = (dtype for dtype in (torch.bfloat16, torch.float16) if device.computes_in(hardware, dtype))
    return next(known, torch.float32)


def searches(policy: Policy) -> bool:
    """Returns whether a policy, or the default of a user's rules, is "search"."""
    return (policy if isinstance(policy, str) else policy.get(DEFAULT)) == "search"


def low_dtype(policy: Policy, hardware: Hardware, *, cpu_has_bf16: bool | None = None) -> torch.dtype:
    """Returns the dtype that a policy, or the default of rules, means. Raises ValueError if the device lacks it."""
    name = policy if isinstance(policy, str) else policy.get(DEFAULT, "auto")
    if name == "auto":
        return best_dtype(hardware, cpu_has_bf16=cpu_has_bf16)
    if name == "search":  # means 16 bits also on a CPU that is no faster in them
        return best_dtype(hardware, cpu_has_bf16=True)
    dtype = dtype_of(name)
    if dtype == torch.float16 and not _has(hardware, dtype):
        raise ValueError(f"precision={name!r}: {hardware.name} does not compute in {dtype_name(dtype)}; use 'auto'")
    return dtype


def _has(hardware: Hardware, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in hardware.flops
