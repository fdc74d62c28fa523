"""Where and when a figure was measured, as each result file says it."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch


def stamp() -> dict[str, Any]:
    """Date, machine and version of torch; the card too where there is one."""
    machine: dict[str, Any] = {
        "processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()
    }  # fmt: skip
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {"date": date.today().isoformat(), "machine": machine, "torch": torch.__version__}


def _processor() -> str:
    """`Intel(R) Xeon(R) …` on Linux; elsewhere what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
