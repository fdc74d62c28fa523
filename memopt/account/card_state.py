"""The blocks that torch's CUDA allocator holds when a step is planned, and how they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn

from memopt.account.optimizer_trial import state_tensors, steps_any
from memopt.compat.tensors import with_memory
from memopt.device.cuda import BLOCK_BYTES
from memopt.device.devices import device_of
from memopt.live_objects import live_objects
from memopt.meter import blocks_of
from memopt.training_state import CallState

WINDOW_BYTES = 32 * 1024**2
"""CUDA's driver takes ranges of addresses from the system that begin and end at multiples of this (docs/card.md)."""
Kind = Literal["free", "given", "gradients", "state", "library", "other"]
"""A block's contents: nothing; parameters, buffers and inputs of the model; its gradients; the state of its optimizers;
a workspace that cuBLAS keeps; all else."""


@dataclass(frozen=True)
class HeldSegment:
    """A segment of the allocator, or a mapped part of an expandable one: what each block holds, and its bytes."""

    small: bool
    """Whether it belongs to the pool for blocks of up to 1 MB."""
    blocks: tuple[tuple[Kind, int], ...]
    """Neighbours of one kind are one block: none of them is freed without the others."""
    expandable: bool = False
    gap_bytes: int = 0
    """The bytes of addresses that are not mapped between the mapped part before this one and this one."""
    address: int | None = None
    """Its address, counted from the start of some window (`WINDOW_BYTES`); None: it lies where a new one would."""

    def __post_init__(self) -> None:
        sizes = [nbytes for _, nbytes in self.blocks]
        if not sizes or min(sizes) <= 0 or self.gap_bytes < 0 or any(size % BLOCK_BYTES for size in sizes):
            raise ValueError(f"a segment needs blocks whose bytes are multiples of {BLOCK_BYTES}, not {sizes[:8]}")

    @property
    def nbytes(self) -> int:
        """The bytes of the card's memory that the segment takes."""
        return sum(nbytes for _, nbytes in self.blocks)


@dataclass(frozen=True)
class CardState:
    """The segments and blocks that torch's allocator holds in a process, by address; empty in a new process.

    Entirely free segments are not included: the allocator returns them to the card before it runs out of memory."""

    segments: tuple[HeldSegment, ...] = ()
    given_bytes: int = 0
    """The bytes of the parameters, buffers and inputs among its blocks, as an account has them."""
    gradient_bytes: int = 0
    """The bytes of the gradients, as an account has them."""
    state_bytes: int = 0
    """The bytes of the state of the model's optimizers, as an account has them."""
    libraries: tuple[int, ...] = ()
    """The bytes of each workspace of cuBLAS among the blocks."""
    apart_bytes: int = 0
    """The bytes of the segments of other streams and pools, from which a step gets no block."""
    apart_allocated_bytes: int = 0
    """The bytes of the blocks in the segments of `apart_bytes` that are not free."""

    @cached_property
    def other_bytes(self) -> int:
        """The allocated bytes of blocks of the kind "other", including those of other streams and pools."""
        blocks = (block for segment in self.segments for block in segment.blocks)
        return self.apart_allocated_bytes + sum(nbytes for kind, nbytes in blocks if kind == "other")

    def without(self, kinds: Collection[Kind]) -> CardState:
        """The state after the blocks of these kinds are freed. All blocks that remain get the kind "other"."""

        def later(segment: HeldSegment) -> HeldSegment:
            blocks: Iterable[tuple[Kind, int]] = (
                ("free" if kind == "free" or kind in kinds else "other", nbytes) for kind, nbytes in segment.blocks
            )
            return replace(segment, blocks=merged(blocks))

        return replace(self, segments=tuple(map(later, self.segments)))


def merged(blocks: Iterable[tuple[Kind, int]]) -> tuple[tuple[Kind, int], ...]:
    """The blocks, with adjacent blocks of one kind merged into one."""
    runs = groupby(blocks, key=lambda block: block[0])
    return tuple((kind, sum(nbytes for _, nbytes in run)) for kind, run in runs)


def rounded_bytes(nbytes: int) -> int:
    """Bytes of the block for a request: the next multiple of 512, and 0 for 0."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def card_state(
    model: nn.Module, inputs: Iterable[torch.Tensor], libraries: Sequence[int], device: torch.device
) -> CardState | None:
    """The blocks of torch's caching allocator on a device now; None for a device that cannot list its segments
    (`Device.segments`). Free segments are returned to the card first.

    Args:
        inputs: those of the call that is planned.
        libraries: the bytes of the workspaces that cuBLAS may have allocated."""
    found = device_of(device).segments(device)
    if found is None:
        return None
    segments, stream = found
    return state_of(segments, _owners_of(model, inputs, device), libraries, stream)


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
    """Copies from which a call can be undone: free, since each call makes its own, which its account has."""

    def kind_of(self, address: int) -> Kind:
        """The kind of the block at an address, by the tensors that Python knows of."""
        if address in self.copies:
            return "free"
        if address in self.given:
            return "given"
        if address in self.gradients:
            return "gradients"
        return "state" if address in self.state else "other"


def _owners_of(model: nn.Module, inputs: Iterable[torch.Tensor], device: torch.device) -> _Owners:
    """The memory on a device that belongs to a model, the inputs of its call, its optimizers, and any tensor."""
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
    `torch.cuda.memory_snapshot` returns them. A block of no known tensor is a workspace of cuBLAS if it has one of the
    sizes in `libraries`."""
    held: list[HeldSegment] = []
    counts: Counter[Kind] = Counter()
    missing, found = Counter(map(rounded_bytes, libraries)), []
    apart = apart_allocated = 0
    ends: dict[bool, int] = {}
    for segment in sorted(segments, key=lambda segment: segment["address"]):
        if segment["stream"] != stream or tuple(segment["segment_pool_id"]) != (0, 0):
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
    kinds = counts["given"], counts["gradients"], counts["state"]
    return CardState(_near(held), *kinds, tuple(found), apart, apart_allocated)


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
