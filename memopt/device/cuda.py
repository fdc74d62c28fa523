"""CUDA cards: torch's caching allocator, the order in which kernels allocate their results, and CUDA's autocast applied
to CPU tensors, since plans for a card that is not present need the casts that it would make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memopt.compat.card import CardAttention, turn_on_expandable_segments
from memopt.compat.operators import (
    composite_kernel,
    cuda_autocast_names,
    schema_of,
    tree_leaves,
    tree_map,
    without_autocast,
)
from memopt.device.context_probe import measure_context_bytes
from memopt.device.cuda_libraries import library_run, start_libraries
from memopt.device.device import Device
from memopt.device.hardware import (
    CARDS,
    LARGE,
    Chip,
    Hardware,
    assumed_context,
    card_reported,
    physical_bytes,
    reported_chip,
)
from memopt.device.live_bytes import OpDryRun
from memopt.device.op_call import OpCall
from memopt.device.workspace_cuda import CUDA_BY_CHIP, CUDA_RULES, library_workspaces
from memopt.device.workspace_reductions import reduction_bytes
from memopt.device.workspace_rules import MB, by_rules, rule_name
from memopt.solver.problem import BlockCall
from passes.graphs.op_kinds import FP32, FP32_SET_DTYPE, LOWER_PRECISION, PROMOTE

# Composite operators that call one of autocast's operators; other composites only view or copy.
_REACH_A_LIST = frozenset(
    {
        "cross_entropy_loss", "nll_loss_nd", "ctc_loss", "std", "var", "norm", "nuclear_norm", "frobenius_norm",
        "lstm", "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward",
    }
)  # fmt: skip


def _casting(operator: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """The operator with `cast` applied to each floating-point tensor argument except fp64 ones."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            args, kwargs = tree_map(lambda value: cast(value) if _eligible(value) else value, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _with_dtype(operator: Any) -> Callable[..., Any]:
    """The operator with `dtype=torch.float32` unless the caller gives a dtype."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in schema_of(operator).arguments]
        given = kwargs.get("dtype") or (args[names.index("dtype")] if names.index("dtype") < len(args) else None)
        with without_autocast():
            if given is None and _eligible(args[0]):
                kwargs = {**kwargs, "dtype": torch.float32}
                args = args[: names.index("dtype")]
            return operator(*args, **kwargs)

    return kernel


def _promoting(operator: Any) -> Callable[..., Any]:
    """The operator with its tensor arguments cast to fp32 where one of them is in fp32."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        types = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _eligible(leaf)}
        if torch.float32 not in types:
            with without_autocast():
                return operator(*args, **kwargs)
        return _casting(operator, lambda value: value.to(torch.float32))(*args, **kwargs)

    return kernel


def _eligible(value: Any) -> bool:
    """Whether autocast casts a value: a floating-point tensor that is not fp64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


ORDER: dict[str, tuple[int, ...]] = {
    "native_dropout": (1, 0),  # aten/src/ATen/native/cuda/Dropout.cu: the mask comes first
    "_fused_dropout": (1, 0),
    "_thnn_fused_lstm_cell": (2, 0, 1),  # aten/src/ATen/native/cuda/RNN.cu: the workspace for the backward comes first
}
"""For each operator, the positions of its results in the order in which its kernel allocates them; operators that are
not listed allocate them in the order in which they return them."""

BLOCK_BYTES = 512
"""Every block of torch's caching allocator is a multiple of this (`kMinBlockSize`)."""


class _Cuda(Device):
    def cards(self) -> Mapping[str, Hardware]:
        """The entries from the makers' data sheets, by their names."""
        return CARDS

    def workspace(self, call: OpCall, chip: Chip = LARGE) -> int:
        """As for any `Device`; kernels that size their grid by the multiprocessors depend on the `chip`."""
        if (by_chip := CUDA_BY_CHIP.get(rule_name(call))) is not None:
            return by_chip(call, chip)
        return by_rules(call, CUDA_RULES, reduction=lambda call: max(4 * MB, reduction_bytes(call, chip)))

    def library_run(self, call: OpCall, chip: Chip) -> OpDryRun | None:
        return library_run(call, chip)

    def result_calls(self, call: OpCall, workspace_bytes: int) -> tuple[BlockCall, ...]:
        """The allocations and frees of a kernel that is in `ORDER`: it allocates its results in that order, then a
        workspace of `workspace_bytes`, which it frees. Empty for other kernels."""
        order = ORDER.get(call.name, ())
        if len(order) != len(call.outputs):
            return ()
        results = tuple(BlockCall(True, place, call.outputs[place].bytes) for place in order)
        if not workspace_bytes:
            return results
        workspace = (BlockCall(allocates, len(order), workspace_bytes) for allocates in (True, False))
        return (*results, *workspace)

    def library_workspaces(self, card: Hardware) -> tuple[int, ...]:
        return library_workspaces(card.major)

    def kernels(self, card: Hardware) -> AbstractContextManager[Any]:
        return CardAttention(card.major)

    def autocast_kernel(self, operator: Any, low: torch.dtype) -> Callable[..., Any] | None:
        """As for any `Device`: it casts, then calls the operator or the operators that it decomposes into. None for
        operators outside of ATen, too."""
        name = operator.overloadpacket.__name__
        if operator.namespace != "aten":
            return None
        if name in LOWER_PRECISION:
            return _casting(operator, lambda value: value.to(low))
        if name in FP32 & cuda_autocast_names():
            return _casting(operator, lambda value: value.to(torch.float32))
        if name in FP32_SET_DTYPE and any(argument.name == "dtype" for argument in schema_of(operator).arguments):
            return _with_dtype(operator)
        if name in PROMOTE:
            return _promoting(operator)
        return composite_kernel(operator) if name in _REACH_A_LIST else None

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
        """The entry of `CARDS` whose name the card reports, with the card's own memory and chip, and half of this
        machine's memory as room on the host."""
        if (known := card_reported(self.name(device))) is None:
            return None
        total = torch.cuda.get_device_properties(device).total_memory
        return replace(known, memory_bytes=total, host_bytes=physical_bytes() // 2, chip=reported_chip(device))

    def reported(self, device: torch.device) -> Hardware:
        """An entry with the name, memory, chip and compute capability that the card reports. Its rates are 0."""
        major = torch.cuda.get_device_capability(device)[0]
        return Hardware(
            name=self.name(device),
            flops={},
            bytes_per_second=0.0,
            launch_seconds=0.0,
            memory_bytes=torch.cuda.get_device_properties(device).total_memory,
            source="",
            major=major,
            context_bytes=assumed_context(major),
            chip=reported_chip(device),
            host_bytes=physical_bytes() // 2,
            device_type=self.type,
        )

    def chip(self, device: torch.device) -> Chip:
        return reported_chip(device)

    def identity(self, device: torch.device) -> dict[str, Any]:
        """The name of the card and the version of its driver, by which measurements differ."""
        driver = Path("/proc/driver/nvidia/version")
        version = driver.read_text().partition("\n")[0] if driver.exists() else str(torch.version.cuda)
        return {"card": self.name(device), "driver": version}

    def there_and_back(self, device: torch.device, nbytes: int) -> Callable[[], None]:
        """A function that copies `nbytes` to pinned memory and back, at once on two streams, without waiting for it."""
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
        return measure_context_bytes(device)

    def start_libraries(self, device: torch.device) -> None:
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

    def expand_segments(self) -> None:
        turn_on_expandable_segments()

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
        """As for any `Device`; None for another allocator than torch's own, and while a CUDA graph is captured."""
        if torch.cuda.get_allocator_backend() != "native" or torch.cuda.is_current_stream_capturing():
            return None
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            stream = torch.cuda.current_stream().cuda_stream
            number = torch.cuda.current_device()
            segments = torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
        return [segment for segment in segments if segment["device"] == number], stream


CUDA = _Cuda("cuda", caching=True, block_bytes=BLOCK_BYTES, backend="inductor")
