"""CUDA cards: rates by name, rules for their kernels, and torch's caching allocator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memopt.device.context_probe import measure_context_bytes
from memopt.device.cuda_autocast import cuda_autocast_kernel
from memopt.device.cuda_cards import CARDS, card_reported, reported_chip
from memopt.device.device import Device
from memopt.device.hardware import LARGE, Chip, Hardware, physical_bytes
from memopt.device.libraries import start_libraries
from memopt.device.library_run import library_run
from memopt.device.op_call import OpCall
from memopt.device.op_rehearsal import Rehearsal
from memopt.device.result_order import calls_in_order
from memopt.device.workspace_cuda import CUDA_BY_CHIP, CUDA_RULES, library_workspaces
from memopt.device.workspace_reductions import reduction_bytes
from memopt.device.workspace_rules import MB, by_rules, rule_name
from memopt.solver.problem import BlockCall

BLOCK_BYTES = 512
"""Every block of torch's caching allocator is a multiple of this (`kMinBlockSize`)."""


class _Cuda(Device):
    def cards(self) -> Mapping[str, Hardware]:
        """The cards of the data sheets."""
        return CARDS

    def workspace(self, call: OpCall, chip: Chip = LARGE) -> int:
        """By rule; kernels whose grid is chosen by the multiprocessors depend on the `chip`."""
        if (by_chip := CUDA_BY_CHIP.get(rule_name(call))) is not None:
            return by_chip(call, chip)
        return by_rules(call, CUDA_RULES, reduction=lambda call: max(4 * MB, reduction_bytes(call, chip)))

    def library_run(self, call: OpCall, chip: Chip) -> Rehearsal | None:
        """Of cuDNN's operators, and of torch's own that allocate more than their results."""
        return library_run(call, chip)

    def result_calls(self, call: OpCall, workspace_bytes: int) -> tuple[BlockCall, ...]:
        """As `calls_in_order` has them."""
        return calls_in_order(call, workspace_bytes)

    def library_workspaces(self, card: Hardware) -> tuple[int, ...]:
        """Those of cuBLAS and cuBLASLt."""
        return library_workspaces(card.major)

    def autocast_kernel(self, operator: Any, low: torch.dtype) -> Callable[..., Any] | None:
        """As `cuda_autocast_kernel` has it."""
        return cuda_autocast_kernel(operator, low)

    def available(self) -> bool:
        return torch.cuda.is_available()

    def in_use(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def current(self) -> torch.device:
        return torch.device(self.type, torch.cuda.current_device())

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def hardware(self, device: torch.device) -> Hardware | None:
        """The card that it says it is; half of this machine's memory is the room on the host."""
        known = card_reported(self.name(device))
        if known is None:
            return None
        chip, total = reported_chip(device), torch.cuda.get_device_properties(device).total_memory
        return replace(
            known,
            memory_bytes=total,
            host_bytes=physical_bytes() // 2,
            multiprocessors=chip.multiprocessors,
            threads_per_multiprocessor=chip.threads,
        )

    def reported(self, device: torch.device) -> Hardware:
        """Its name, memory, chip and compute capability."""
        chip = reported_chip(device)
        return Hardware(
            name=self.name(device),
            flops={},
            bytes_per_second=0.0,
            launch_seconds=0.0,
            memory_bytes=torch.cuda.get_device_properties(device).total_memory,
            source="",
            major=torch.cuda.get_device_capability(device)[0],
            multiprocessors=chip.multiprocessors,
            threads_per_multiprocessor=chip.threads,
            host_bytes=physical_bytes() // 2,
            device_type=self.type,
        )

    def chip(self, device: torch.device) -> Chip:
        """Its multiprocessors, as it reports them."""
        return reported_chip(device)

    def identity(self, device: torch.device) -> dict[str, Any]:
        """The card and its driver."""
        driver = Path("/proc/driver/nvidia/version")
        version = driver.read_text().partition("\n")[0] if driver.exists() else str(torch.version.cuda)
        return {"card": self.name(device), "driver": version}

    def there_and_back(self, device: torch.device, nbytes: int) -> Callable[[], None]:
        """Copies on two streams."""
        hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        values = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        stream: Any = torch.cuda.Stream
        streams = [stream(device) for _ in range(2)]

        def copy() -> None:
            with torch.cuda.stream(streams[0]):
                hosts[0].copy_(values[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                values[1].copy_(hosts[1], non_blocking=True)

        return copy

    def measure_context_bytes(self, device: torch.device) -> int | None:
        """Measured in another process."""
        return measure_context_bytes(device)

    def start_libraries(self, device: torch.device) -> None:
        """cuBLAS and cuBLASLt, on this thread and on autograd's."""
        start_libraries(device)

    def generator_state(self, device: torch.device) -> torch.Tensor:
        return torch.cuda.get_rng_state(device)

    def set_generator_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def free_bytes(self, device: torch.device) -> int:
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + self.cached_bytes(device)

    def cached_bytes(self, device: torch.device) -> int:
        return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def allocated_bytes(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device)

    def requested_bytes(self, device: torch.device) -> int:
        figures = torch.cuda.memory_stats(device)
        # An allocator other than torch's own counts no requests.
        return figures.get("requested_bytes.all.current") or figures.get("allocated_bytes.all.current", 0)

    def peak_bytes(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def reset_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def segments(self, device: torch.device) -> tuple[list[dict[str, Any]], int] | None:
        """None with another allocator than torch's own, and while a CUDA graph is captured."""
        if torch.cuda.get_allocator_backend() != "native" or torch.cuda.is_current_stream_capturing():
            return None
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            stream = torch.cuda.current_stream().cuda_stream
            segments = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
        return [segment for segment in segments if segment["device"] == (device.index or 0)], stream


CUDA = _Cuda("cuda", caching=True, block_bytes=BLOCK_BYTES, backend="inductor")
