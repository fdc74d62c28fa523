"""The blocks that torch's CUDA allocator holds when a step is planned: a replay of the step begins with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

from memopt.device.cuda import BLOCK_BYTES

WINDOW_BYTES = 32 * 1024**2
"""CUDA's driver takes ranges of addresses from the system that begin and end at multiples of this (docs/card.md)."""
Kind = Literal["free", "given", "gradients", "state", "library", "other"]
"""What a block holds: nothing; parameters, buffers and inputs of the model; its gradients; the state of its optimizers;
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
