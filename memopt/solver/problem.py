"""The rematerialisation problem: what the solvers see of a training step, in numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory that an op makes: a tensor with all its views and aliases.

    Storages that exist before the step and outlive it (parameters, buffers, inputs) are not listed: they are free to
    read and count once, in `RematProblem.resident_bytes`.
    """

    name: str
    bytes: int
    kept: bool = False
    """A result of the step (an output, a gradient): alive from its making to the end of the schedule."""
    movable: bool = True
    """False for what cannot wait on the host: a generator's state, memory that is written to again."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of the joint graph. `reads` and `makes` are indices into `RematProblem.storages`."""

    name: str
    seconds: float
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    workspace_bytes: int = 0
    """Temporary bytes that the kernel holds while it runs, beside what it reads and makes."""
    recomputable: bool = True
    """False for ops whose second evaluation would differ: effects, collectives, readers of mutated buffers."""
    block: int = -1
    """Number of the repeated block (a layer) that the op belongs to, -1 outside of them."""
    attention: bool = False
    """True inside an attention core (scores, softmax, weighted sum)."""


@dataclass(frozen=True)
class RematProblem:
    """A joint graph, priced: ops `0 … forward_ops-1` are the forward, the rest the backward, each in program order."""

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
        """For each storage, the op that makes it."""
        producer = [-1] * len(self.storages)
        for index, op in enumerate(self.ops):
            for storage in op.makes:
                producer[storage] = index
        return tuple(producer)

    @cached_property
    def seconds(self) -> float:
        """Seconds of the plain step: every op once."""
        return sum(op.seconds for op in self.ops)
