"""The memory of the host that is free now."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int | None:
    """Bytes of free memory: what Linux says is available, within the limit of this container; None where that is not
    known."""
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
