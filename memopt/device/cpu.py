"""The CPU: its memory is the host's, and its kernels are run to be measured."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memopt.compat.host import HOST
from memopt.device.device import Device
from memopt.device.hardware import LARGE, Chip, Hardware, physical_bytes
from memopt.device.op_call import OpCall
from memopt.device.workspace_cpu import CPU_RULES, converted, promoted
from memopt.device.workspace_rules import SCALARS, by_rules

_CGROUP = Path("/sys/fs/cgroup")


class _Cpu(Device):
    def cards(self) -> Mapping[str, Hardware]:
        """This machine's CPU as a guess from its number of threads."""
        threads = torch.get_num_threads()
        core = 2 * 2 * 8 * 2.5e9  # two FMA units of eight lanes at 2.5 GHz
        rates = {"float64": core / 2, "float32": core, "bfloat16": core, "float16": core}
        guess = Hardware(
            name=self.type,
            flops={dtype: threads * rate for dtype, rate in rates.items()},
            bytes_per_second=25.6e9,
            launch_seconds=2e-6,
            memory_bytes=physical_bytes(),
            least_moved_bytes=4096,
            source=f"{threads} threads, each two AVX2 FMA units at 2.5 GHz, and one channel of DDR4-3200; assumed",
            device_type=self.type,
        )
        return {guess.name: guess}

    def workspace(self, call: OpCall, chip: Chip = LARGE) -> int:
        """By rule; pointwise operators and reductions copy the arguments whose dtype must change."""
        return by_rules(call, CPU_RULES, pointwise=lambda call: promoted(call) + SCALARS, reduction=converted)

    def computes_in(self, card: Hardware, dtype: torch.dtype) -> bool:
        """Whether it has the instructions (AVX512-BF16 or AMX); none of them computes in fp16."""
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        names = ("avx512_bf16", "amx_bf16", "amx_tile", "bf16") if dtype == torch.bfloat16 else ()
        return any(bool(capabilities.get(name)) for name in names)

    def available(self) -> bool:
        return True

    def in_use(self) -> bool:
        return True

    def hardware(self, device: torch.device) -> Hardware:
        """The guess of `cards`."""
        return self.cards()[self.type]

    def reported(self, device: torch.device) -> Hardware:
        """The guess of `cards`, to be replaced by what is measured."""
        return replace(self.hardware(device), major=0, host_bytes=physical_bytes() // 2)

    def identity(self, device: torch.device) -> dict[str, Any]:
        """Its model, and the number of threads."""
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        processor = next(names, platform.processor() or platform.machine())
        return {"card": processor, "threads": torch.get_num_threads()}

    def free_bytes(self, device: torch.device) -> int | None:
        """What Linux says is available, within the limit of this container."""
        known = [nbytes for nbytes in (_available(), _left_of_container()) if nbytes is not None]
        return min(known, default=None)


def _available() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _left_of_container() -> int | None:
    with suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return max(0, limit - used)
    return None


CPU = _Cpu(HOST.type, is_host=True, generator_state_bytes=5056, foreach=False)
