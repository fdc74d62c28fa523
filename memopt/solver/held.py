"""What every schedule holds at each op, whatever it recomputes: the order of first evaluations leaves no choice."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memopt.solver.arrays import Flags, Ints
from memopt.solver.problem import RematProblem


def movable_storages(problem: RematProblem) -> list[bool]:
    """Per storage: whether it can be dropped and made again."""
    return [
        op < problem.forward_ops and problem.ops[op].recomputable and not problem.storages[storage].kept
        for storage, op in enumerate(problem.producer)
    ]


class Held:
    """What is held while each op is first evaluated, beside what it reads and makes.

    Kept results so far, and what cannot be made again (of the backward, of unrepeatable ops) and is still to be read.
    `held[i]` are the storages at op i.
    """

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        self.movable: Flags = np.array(movable_storages(problem), np.bool_)
        self._size = np.array([storage.bytes for storage in problem.storages], np.int64)
        self._from = np.array(problem.producer, np.int64) + 1
        last = self._from - 1
        for index, op in enumerate(problem.ops):
            last[list(op.reads)] = index
        last[np.array([storage.kept for storage in problem.storages], np.bool_)] = len(problem.ops)
        self._last = last

    def __getitem__(self, index: int) -> frozenset[int]:
        alive = ~self.movable & (self._from <= index) & (index <= self._last)
        return frozenset(np.flatnonzero(alive).tolist())

    @cached_property
    def bytes(self) -> Ints:
        """Per op, and at the end of the step: bytes of what is held."""
        change = np.zeros(len(self._problem.ops) + 2, np.int64)
        fixed = ~self.movable & (self._from <= self._last)
        np.add.at(change, self._from[fixed], self._size[fixed])
        np.add.at(change, np.minimum(self._last[fixed], len(self._problem.ops)) + 1, -self._size[fixed])
        return np.cumsum(change[:-1])

    @cached_property
    def own_bytes(self) -> Ints:
        """Per op: the same with its workspace and what it reads and makes, movable storages apart."""
        beside = [
            op.workspace_bytes + sum(int(self._size[s]) for s in op.makes if not self.movable[s])
            for op in self._problem.ops
        ]
        return self.bytes[:-1] + np.array(beside, np.int64)

    @cached_property
    def needs(self) -> Ints:
        """Per op: the least bytes in use at its first evaluation, resident ones included."""
        moved = [sum(int(self._size[s]) for s in {*op.reads, *op.makes} if self.movable[s]) for op in self._problem.ops]
        return self._problem.resident_bytes + self.own_bytes + np.array(moved, np.int64)
