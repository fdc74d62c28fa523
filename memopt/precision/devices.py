"""What "auto" means on a device, present or not."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memopt.precision.plan import dtype_name, dtype_of
from memopt.precision.rules import DEFAULT
from memopt.pricing.hardware_table import Hardware

POLICIES = ("fp32", "bf16", "fp16", "auto")


def best_dtype(hardware: Hardware, *, cpu_has_bf16: bool | None = None) -> torch.dtype:
    """bf16 where the device computes in it, fp16 where it has only that, else fp32.

    A CPU has bf16 if its instructions do (AVX512-BF16 or AMX); `cpu_has_bf16` says so for one that is not this one.
    """
    if hardware.name == "cpu":
        has = _this_cpu_has_bf16() if cpu_has_bf16 is None else cpu_has_bf16
        return torch.bfloat16 if has else torch.float32
    known = [dtype for dtype in (torch.bfloat16, torch.float16) if _has(hardware, dtype)]
    return known[0] if known else torch.float32


def low_dtype(policy: str | Mapping[str, str], hardware: Hardware, *, cpu_has_bf16: bool | None = None) -> torch.dtype:
    """The dtype that a policy, or the default of a user's rules, asks for. Raises ValueError if there is none such."""
    name = policy if isinstance(policy, str) else policy.get(DEFAULT, "auto")
    if name == "auto":
        return best_dtype(hardware, cpu_has_bf16=cpu_has_bf16)
    if isinstance(policy, str) and name not in POLICIES:
        raise ValueError(f"unknown precision {name!r}; known are {', '.join(POLICIES)}, or a dict of rules")
    dtype = dtype_of(name)
    if dtype == torch.float16 and not _has(hardware, dtype):
        raise ValueError(f"precision={name!r}: {hardware.name} does not compute in {dtype_name(dtype)}; use 'auto'")
    return dtype


def _has(hardware: Hardware, dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in hardware.flops


def _this_cpu_has_bf16() -> bool:
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "amx_tile", "bf16"))
