"""The rematerialisation problem and its schedules, without torch: a training step as operators and storages with
seconds and bytes; the order in which ops run, some of them more than once, and the storages offloaded in between."""

from __future__ import annotations

import math
from collections import Counter
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
    home: bool = False
    """True for a storage that lies on the host for the whole step, as a frozen parameter may: it is never copied out,
    and the copy back of its first offload brings it to the device. The op that makes it stands for the beginning of the
    step."""


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

    @property
    def is_receipt(self) -> bool:
        """Whether the op stands for a value that comes from outside: the gradient of an output."""
        return not self.reads and not self.seconds


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
    def tangents(self) -> int:
        """The number of ops at the start of the backward that only receive the gradients of outputs."""
        backward = self.ops[self.forward_ops :]
        return next((number for number, op in enumerate(backward) if not op.is_receipt), len(backward))

    @cached_property
    def home_bytes(self) -> int:
        """The bytes of the storages that are on the host for the whole step."""
        return sum(storage.bytes for storage in self.storages if storage.home)

    @cached_property
    def results(self) -> frozenset[int]:
        """The indices of the storages of the forward's results."""
        made = (op.makes for op in self.ops[: self.forward_ops] if not op.is_receipt)
        return frozenset(storage for makes in made for storage in makes if self.storages[storage].kept)

    @cached_property
    def output_bytes(self) -> int:
        """The bytes of `results`, which the caller may hold until the step's end."""
        return sum(self.storages[storage].bytes for storage in self.results)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step without recomputation: the sum over all ops, once each."""
        return sum(op.seconds for op in self.ops)


@dataclass(frozen=True, slots=True)
class Link:
    """The link to the host's memory as two queues, one for each direction (PCIe and NVLink are full duplex), each of
    which moves one storage at a time.

    Transfers run in parallel to compute. With a bandwidth of 0 nothing can be offloaded; with an infinite one a
    transfer takes the latency only."""

    bytes_per_second: float
    """Bandwidth of each direction."""
    latency_seconds: float = 0.0
    """Seconds added to every transfer."""
    host_bytes: int | None = None
    """The most bytes that may be on the host at one time; None for no limit."""

    def __post_init__(self) -> None:
        for name, value in (("bytes_per_second", self.bytes_per_second), ("latency_seconds", self.latency_seconds)):
            if math.isnan(value) or value < 0:
                raise ValueError(f"a link's {name} is 0 or more, not {value}")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise ValueError(f"a link's host_bytes is 0 or more, or None for no limit, not {self.host_bytes}")

    def transfer_seconds(self, size_bytes: int) -> float:
        """Seconds for which a transfer of `size_bytes` occupies one direction; infinite without bandwidth."""
        if self.bytes_per_second == 0:
            return math.inf
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Offload:
    """A storage copied to the host and back. The other fields are positions in `Schedule.evaluations`, counted from 0.

    Compute waits before `freed_before` until the copy out is done, and before `back_before` until the copy back is
    done. So the live bytes at each position do not depend on the real speed of the link; only the seconds do.
    """

    storage: int
    out_after: int
    """The copy out joins its queue when this evaluation is done; it copies the latest version at that position."""
    freed_before: int
    """From this evaluation on the version's bytes are free, unless a later op still reads the version."""
    fetch_from: int
    """The copy back joins its queue right before this evaluation; its bytes are live from here on."""
    back_before: int
    """From this evaluation on, reads bind to the fetched copy, until the producer is recomputed."""


@dataclass(frozen=True)
class Schedule:
    """Op indices in the order in which they run, and the offloads.

    First evaluations are in program order. Backward ops are evaluated once; forward ops may be recomputed anywhere
    after their first evaluation. Each evaluation makes a new version of the storages that its op makes. A read binds to
    the latest version, and a version is live until its last read (the first version of a `Storage.kept` storage: until
    the end)."""

    evaluations: tuple[int, ...]
    offloads: tuple[Offload, ...] = ()
    """Transfers of one direction that are issued at the same position run by deadline, then in this order."""

    @classmethod
    def save_all(cls, problem: RematProblem) -> Schedule:
        """The schedule of training without recomputation: every op once, in program order."""
        return cls(tuple(range(len(problem.ops))))

    def recomputed(self) -> dict[int, int]:
        """The number of recomputations of each recomputed op, by op index."""
        return {op: count - 1 for op, count in Counter(self.evaluations).items() if count > 1}

    def added_seconds(self, problem: RematProblem) -> float:
        """Seconds of all recomputations: of every evaluation beyond the first of its op."""
        return sum(problem.ops[op].seconds * times for op, times in self.recomputed().items())

    def check(self, problem: RematProblem) -> None:
        """Raise `ValueError` if this is not a valid schedule of `problem`; the message names the first violation."""
        seen: set[int] = set()
        for position, index in enumerate(self.evaluations):
            if not 0 <= index < len(problem.ops):
                raise ValueError(f"evaluation {position} is op {index}, but there are only {len(problem.ops)} ops")
            op = problem.ops[index]
            if index in seen:
                if index >= problem.forward_ops or not op.recomputable:
                    raise ValueError(f"evaluation {position} recomputes {op.name}, which must not be recomputed")
                continue
            if index != len(seen):
                raise ValueError(
                    f"evaluation {position} is {op.name}, although op {len(seen)} comes before it and was never run"
                )
            seen.add(index)
        if len(seen) != len(problem.ops):
            raise ValueError(
                f"the schedule evaluates {len(seen)} of the problem's {len(problem.ops)} ops; the first that is "
                f"missing is {problem.ops[len(seen)].name}"
            )
        self._check_offloads(problem)

    def _check_offloads(self, problem: RematProblem) -> None:
        made_at: dict[int, int] = {}
        for position, index in enumerate(self.evaluations if self.offloads else ()):
            for made in problem.ops[index].makes:
                made_at.setdefault(made, position)
        back: dict[int, int] = {}
        for offload in sorted(self.offloads, key=lambda offload: offload.out_after):
            if not 0 <= offload.storage < len(problem.storages):
                raise ValueError(
                    f"{offload} names a storage that is not among the problem's {len(problem.storages)} storages"
                )
            storage = problem.storages[offload.storage]
            if storage.kept or not storage.movable:
                why = "a result of the step must stay on the device" if storage.kept else "it cannot be moved"
                raise ValueError(f"{offload} moves {storage.name} to the host, but {why}")
            if (
                not offload.out_after
                < offload.freed_before
                <= offload.fetch_from
                <= offload.back_before
                < len(self.evaluations)
            ):
                raise ValueError(
                    f"{offload} needs out_after < freed_before <= fetch_from <= back_before < {len(self.evaluations)}, "
                    "the number of evaluations"
                )
            if offload.out_after < made_at[offload.storage]:
                raise ValueError(
                    f"{offload} copies {storage.name} before evaluation {made_at[offload.storage]} makes it"
                )
            if offload.out_after < back.get(offload.storage, 0):
                raise ValueError(f"{offload} begins before {storage.name} is back from an earlier offload")
            back[offload.storage] = offload.back_before
