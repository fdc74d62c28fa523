"""The memory that is free now, on a GPU or on the host."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Bytes of free memory on a device; None where that is not known.

    On a GPU they include what torch's allocator has reserved and not handed out. On the host they are what Linux says
    is available, within the limit of this container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
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
