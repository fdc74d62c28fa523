"""What every kind of device answers: allocator, workspaces, autocast, generators, links and rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from memopt.device.hardware import LARGE, Chip, Hardware
from memopt.device.live_bytes import OpDryRun
from memopt.device.op_call import OpCall
from memopt.device.workspace_rules import by_rules
from memopt.solver.problem import BlockCall


@dataclass(frozen=True)
class Device:
    """A kind of device, with the name that torch gives its type ("cuda").

    This base class stands for kinds that memopt does not know: nothing is counted, timed or planned for them. To
    support a kind, add a file with a subclass, and an entry in `memopt.device.devices.DEVICES`. For planning, override
    at least `cards`, `workspace` and `block_bytes`; to train on it, also every method that takes a `torch.device`."""

    type: str
    is_host: bool = False
    """Whether its memory is the host's and the host's threads run its kernels: nothing is offloaded or overlaps."""
    caching: bool = False
    """Whether torch's caching allocator gives out its memory, in segments that it keeps. If so, plans are replayed in
    the model of that allocator (`memopt.account.caching_allocator`), bytes are read from its counters, and the account
    has the driver's context, which lies beside its memory."""
    block_bytes: int = 1
    """Every allocation takes a multiple of these bytes."""
    generator_state_bytes: int = 16
    """Bytes of its random generator's saved state."""
    foreach: bool = True
    """Whether torch's optimizers use their foreach implementation there by default."""
    sums_in_16_bits: frozenset[str] = frozenset()
    """Operators whose kernels, or those of their backward, sum over many rows in 16 bits where their input has them."""
    backend: Literal["aten", "inductor"] = "aten"
    """The meaning of `backend="auto"` there."""

    def cards(self) -> Mapping[str, Hardware]:
        """The known cards of this kind with their rates, by name."""
        return {}

    def workspace(self, call: OpCall, chip: Chip = LARGE) -> int:
        """An upper bound, from a rule, on the temporary bytes that the kernel of a call holds besides its inputs and
        outputs."""
        return by_rules(call, {})

    def library_run(self, call: OpCall, chip: Chip) -> OpDryRun | None:
        """The allocations and frees during a run, on this machine's card, of an operator whose kernels have a
        workspace; None for other operators, and where there is no card with that `chip`."""
        return None

    def result_calls(self, call: OpCall, workspace_bytes: int) -> tuple[BlockCall, ...]:
        """The allocations and frees of a kernel that allocates its results in another order than it returns them, with
        those of its workspace of `workspace_bytes`; empty for all other kernels."""
        return ()

    def library_workspaces(self, card: Hardware) -> tuple[int, ...]:
        """Bytes of the blocks that libraries allocate at their first calls and keep."""
        return ()

    def autocast_kernel(self, operator: Any, low: torch.dtype) -> Callable[..., Any] | None:
        """A function that computes an operator on CPU tensors as autocast with the dtype `low` does on this kind of
        device; None for an operator that autocast leaves as it is."""
        return None

    def kernels(self, card: Hardware) -> AbstractContextManager[Any]:
        """A context in which operators on tensors of another device, such as "meta", use the kernels of `card`."""
        return nullcontext()

    def computes_in(self, card: Hardware, dtype: torch.dtype) -> bool:
        """Whether a card has units for a 16-bit dtype, so that `precision="auto"` may choose it."""
        return str(dtype).removeprefix("torch.") in card.flops

    def available(self) -> bool:
        """Whether this machine has a device of this kind that torch can use."""
        return False

    def in_use(self) -> bool:
        """Whether this process has already used a device of this kind."""
        return False

    def current(self) -> torch.device:
        """The device on which torch allocates new tensors of this type."""
        return torch.device(self.type)

    def synchronize(self, device: torch.device) -> None:
        """Wait until all kernels on the device are done."""

    def name(self, device: torch.device) -> str:
        """The name of a device of this machine, as its driver reports it."""
        return str(device)

    def hardware(self, device: torch.device) -> Hardware | None:
        """The entry of `cards` for a device of this machine, with the memory and chip that it reports, or None."""
        return None

    def reported(self, device: torch.device) -> Hardware:
        """A `Hardware` with the name, memory and chip that a device of this machine reports, whose rates are still to
        be measured. Raises `ValueError` for a kind that memopt cannot measure."""
        raise ValueError(
            f"memopt cannot measure the device {str(device)!r}; give device= the name of a card, one of those that "
            "memopt.device.known_hardware() returns"
        )

    def chip(self, device: torch.device) -> Chip:
        """The properties of the device's chip that the workspaces of its kernels depend on."""
        return LARGE

    def identity(self, device: torch.device) -> dict[str, Any]:
        """The properties of a device that measurements on it depend on, besides the version of torch. They are the key
        under which measurements are stored on disk."""
        return {"card": self.name(device)}

    def there_and_back(self, device: torch.device, nbytes: int) -> Callable[[], None] | None:
        """A function that copies `nbytes` to pinned host memory and, at the same time, as many back; None for a device
        without a link."""
        return None

    def measure_context_bytes(self, device: torch.device) -> int | None:
        """The bytes that a process holds on the device outside of torch's allocator; None where they are not known."""
        return None

    def start_libraries(self, device: torch.device) -> None:
        """Make libraries such as cuBLAS allocate the workspaces that they keep, or raise `torch.OutOfMemoryError`."""

    def generator_state(self, device: torch.device) -> torch.Tensor | None:
        """The state of the device's random generator; None where it has none of its own."""
        return None

    def set_generator_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Set the device's random generator to a state that `generator_state` returned."""

    def free_bytes(self, device: torch.device) -> int | None:
        """Bytes that can be allocated now, with those cached by torch's allocator; None where that is not known."""
        return None

    def cached_bytes(self, device: torch.device) -> int:
        """Bytes that torch's allocator has reserved and not allocated."""
        return 0

    def empty_cache(self) -> None:
        """Return to the device the bytes that torch's allocator has reserved and not allocated."""

    def expand_segments(self) -> None:
        """Make torch's caching allocator use expandable segments from now on, in this process."""

    def allocated_bytes(self, device: torch.device) -> int:
        """Bytes that torch's caching allocator has allocated for tensors now."""
        raise NotImplementedError

    def requested_bytes(self, device: torch.device) -> int:
        """The part of `allocated_bytes` that was requested, without what the allocator adds to fill its blocks."""
        raise NotImplementedError

    def peak_bytes(self, device: torch.device) -> int:
        """The most bytes that were allocated at once since `reset_peak`."""
        raise NotImplementedError

    def reset_peak(self, device: torch.device) -> None:
        """Set the peak that `peak_bytes` returns to what is allocated now."""
        raise NotImplementedError

    def segments(self, device: torch.device) -> tuple[list[dict[str, Any]], int] | None:
        """The segments of torch's caching allocator, as `torch.cuda.memory_snapshot` describes them after free ones are
        returned to the device, and the number of the current stream; None where the allocator cannot list them now."""
        return None
