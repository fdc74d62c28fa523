"""A third kind of device in one file, as somebody outside of memopt would write it: one of Intel's GPUs, made up."""

from __future__ import annotations

from collections.abc import Mapping

from memopt.device import Device, Hardware
from memopt.device.hardware import LARGE, Chip
from memopt.device.op_call import OpCall
from memopt.device.workspace_rules import by_rules, output_bytes

MB, GB = 1024**2, 1024**3
LIBRARY_BYTES = 24 * MB
RULES = {"mm": output_bytes, "addmm": output_bytes, "native_layer_norm_backward": lambda call: 3 * MB}
"""Products are accumulated beside their results."""


class Xpu(Device):
    """Facts that memopt needs to plan for it."""

    def cards(self) -> Mapping[str, Hardware]:
        """One card."""
        max_1100 = Hardware(
            name="max-1100",
            flops={"float32": 22e12, "bfloat16": 176e12},
            bytes_per_second=1.2e12,
            launch_seconds=1e-5,
            memory_bytes=48 * GB,
            source="made up for a test",
            link_bytes_per_second=63e9,
            context_bytes=200 * MB,
            device_type=self.type,
        )
        return {max_1100.name: max_1100}

    def workspace(self, call: OpCall, chip: Chip = LARGE) -> int:
        """By its rules; pointwise operators hold nothing."""
        return by_rules(call, RULES)

    def library_workspaces(self, card: Hardware) -> tuple[int, ...]:
        """That of oneMKL."""
        return (LIBRARY_BYTES,)


XPU = Xpu("xpu", caching=True, block_bytes=512)
