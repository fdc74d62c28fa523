"""Reads the state of torch's CUDA allocator in this process: which blocks are there, and what they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memopt.account.caching_allocator import rounded_bytes
from memopt.account.card_state import WINDOW_BYTES, CardState, HeldSegment, Kind, merged
from memopt.account.optimizer_trial import state_tensors, steps_any
from memopt.compat.tensors import with_memory
from memopt.device.devices import device_of
from memopt.live_objects import live_objects
from memopt.meter import blocks_of
from memopt.training_state import CallState

_DEFAULT_POOL = 0, 0


def card_state(
    model: nn.Module, inputs: Iterable[torch.Tensor], libraries: Sequence[int], device: torch.device
) -> CardState | None:
    """The blocks of torch's caching allocator on a device now; None for a device that cannot list its segments
    (`Device.segments`). Free segments are returned to the card first.

    Args:
        inputs: those of the call that is planned.
        libraries: the bytes of the workspaces that cuBLAS may have allocated.
    """
    found = device_of(device).segments(device)
    if found is None:
        return None
    segments, stream = found
    return state_of(segments, owners_of(model, inputs, device), libraries, stream)


@dataclass(frozen=True)
class _Owners:
    """The memory of tensors on a device, as bytes by address."""

    given: Mapping[int, int] = field(default_factory=dict)
    """Parameters, buffers and inputs."""
    gradients: Mapping[int, int] = field(default_factory=dict)
    state: Mapping[int, int] = field(default_factory=dict)
    """The state of the optimizers that step the parameters."""
    tensors: Mapping[int, int] = field(default_factory=dict)
    """All tensors that Python knows."""
    copies: Collection[int] = ()
    """The addresses of copies from which a call can be undone. Their blocks count as free: each call makes its own
    copies, and its account has them among the bytes that are still to come."""

    def kind_of(self, address: int) -> Kind:
        """What the block at an address holds, as far as Python knows."""
        if address in self.copies:
            return "free"
        if address in self.given:
            return "given"
        if address in self.gradients:
            return "gradients"
        return "state" if address in self.state else "other"


def owners_of(model: nn.Module, inputs: Iterable[torch.Tensor], device: torch.device) -> _Owners:
    """Which memory on a device belongs to what, as bytes by address: to the parameters and buffers of a model and the
    inputs of its call, to its gradients, to the state of its optimizers, to any tensor of the process. Also the
    addresses of the copies from which a call of the model can be undone."""
    objects = live_objects(torch.Tensor, torch.optim.Optimizer)
    ids = set(map(id, model.parameters()))
    own = [one for one in objects if isinstance(one, torch.optim.Optimizer) and steps_any(one, ids)]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    owned = with_memory([*model.parameters(), *model.buffers(), *inputs])
    in_gradients = blocks_of(with_memory(gradients), device)
    given = {address: nbytes for address, nbytes in blocks_of(owned, device).items() if address not in in_gradients}
    return _Owners(
        given,
        in_gradients,
        blocks_of(with_memory(tensor for optimizer in own for tensor in state_tensors(optimizer)), device),
        blocks_of((one for one in objects if isinstance(one, torch.Tensor)), device),
        blocks_of(CallState.copies_of(model), device),
    )


def state_of(
    segments: Iterable[Mapping[str, Any]], owners: _Owners, libraries: Sequence[int], stream: int
) -> CardState:
    """The state of torch's allocator as a step on the CUDA stream `stream` finds it, from `segments` as
    `torch.cuda.memory_snapshot` returns them. `owners` says what a block holds. A block of no known tensor is a
    workspace of cuBLAS if it has one of the sizes in `libraries`: the bytes of the workspaces that cuBLAS may have
    allocated."""
    held: list[HeldSegment] = []
    counts: Counter[Kind] = Counter()
    missing, found = Counter(map(rounded_bytes, libraries)), []
    apart = apart_allocated = 0
    ends: dict[bool, int] = {}
    for segment in sorted(segments, key=lambda segment: segment["address"]):
        if segment["stream"] != stream or tuple(segment["segment_pool_id"]) != _DEFAULT_POOL:
            apart += segment["total_size"]
            apart_allocated += segment["allocated_size"]
            continue
        blocks: list[tuple[Kind, int]] = []
        for block in segment["blocks"]:
            address, requested = block["address"], rounded_bytes(block["requested_size"])
            kind: Kind = owners.kind_of(address) if block["state"] == "active_allocated" else "free"
            if kind == "other" and address not in owners.tensors and missing[requested]:
                kind = "library"
                missing[requested] -= 1
                found.append(requested)
            counts[kind] += requested
            blocks.append((kind, block["size"]))
        small, expandable = segment["segment_type"] == "small", segment["is_expandable"]
        if all(kind == "free" for kind, _ in blocks):
            continue  # torch returns it before the card is full
        gap = segment["address"] - ends[small] if expandable and small in ends else 0
        if expandable:
            ends[small] = segment["address"] + segment["total_size"]
        held.append(HeldSegment(small, merged(blocks), expandable, gap, None if expandable else segment["address"]))
    return CardState(
        _near(held),
        counts["given"],
        counts["gradients"],
        counts["state"],
        tuple(found),
        apart,
        apart_allocated,
    )


def _near(segments: Sequence[HeldSegment]) -> tuple[HeldSegment, ...]:
    """The segments with their addresses counted from the window in which the lowest begins. Of several empty windows
    between two segments, one is kept. So the result is the same in every process that makes the same allocations."""
    placed: list[HeldSegment] = []
    end = shift = 0
    for segment in segments:
        if segment.address is not None:
            begin = segment.address // WINDOW_BYTES
            shift += max(0, begin - shift - end) if placed else begin
            address = segment.address - shift * WINDOW_BYTES
            end = -(-(address + segment.nbytes) // WINDOW_BYTES) + 1
            segment = replace(segment, address=address)
        placed.append(segment)
    return tuple(placed)
