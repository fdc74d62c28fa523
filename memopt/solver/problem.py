"""The rematerialisation problem: a training step as operators and storages with seconds and bytes, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory that an op makes: a tensor together with all its views and aliases.

    Storages that exist before the step and outlive it (parameters, buffers, inputs) are not listed. Reading them is
    free, and their bytes count once, in `RematProblem.resident_bytes`.
    """

    name: str
    bytes: int
    kept: bool = False
    """True for a result of the step (an output, a gradient): it is live from its making to the end of the schedule."""
    movable: bool = True
    """False for a storage that must not be offloaded: a generator's state, or memory that a later op writes to."""


class BlockCall(NamedTuple):
    """The allocation, or the freeing, of one block of memory while an operator runs."""

    allocates: bool
    block: int
    """The block's number. From 0 on they are the storages that the operator makes, in order; all others are its
    workspace."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of the joint graph; `reads` and `makes` are indices into `RematProblem.storages`."""

    name: str
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    workspace_bytes: int = 0
    """Temporary bytes that the operator holds while it runs, besides the storages that it reads and makes."""
    recomputable: bool = True
    """False for ops that must run once only: side effects, collectives, readers of buffers that are mutated."""
    block: int = -1
    """Number of the repeated block (a layer) that the op belongs to, or -1 outside of all blocks."""
    attention: bool = False
    """True for ops of an attention core (scores, softmax, weighted sum)."""
    calls: tuple[BlockCall, ...] = ()
    """The allocator's calls within the operator, in order, where they are known. Solvers and the simulator count
    `workspace_bytes`; the model of the allocator follows the calls. Where there are none, the workspace is one block,
    allocated after the storages that the operator makes."""


@dataclass(frozen=True)
class RematProblem:
    """A joint graph with its costs: ops `0 … forward_ops-1` are the forward, the others the backward.

    Ops are in program order: a storage is made by exactly one op, and before any op reads it.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    forward_ops: int
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        made: set[int] = set()
        for op in self.ops:
            missing = [s for s in op.reads if s not in made]
            assert not missing, f"op {op.name} reads storages {missing} before they are made"
            twice = made.intersection(op.makes)
            assert not twice, f"op {op.name} makes storages {sorted(twice)} that another op made"
            made.update(op.makes)
        assert 0 <= self.forward_ops <= len(self.ops)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each storage, the index of the op that makes it."""
        producer = [-1] * len(self.storages)
        for index, op in enumerate(self.ops):
            for storage in op.makes:
                producer[storage] = index
        return tuple(producer)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step without recomputation: the sum over all ops, once each."""
        return sum(op.seconds for op in self.ops)
