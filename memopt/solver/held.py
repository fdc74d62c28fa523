"""The bytes that every schedule holds at each op's first evaluation, whatever it recomputes."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memopt.solver.arrays import Flags, Ints
from memopt.solver.problem import RematProblem


def movable_storages(problem: RematProblem) -> list[bool]:
    """Per storage: whether it can be freed and recomputed."""
    return [
        op < problem.forward_ops and problem.ops[op].recomputable and not problem.storages[storage].kept
        for storage, op in enumerate(problem.producer)
    ]


class Held:
    """The storages that every schedule holds at each op's first evaluation, besides those that the op reads and makes.

    They are the kept results made so far, and the storages still to be read that cannot be recomputed: those of
    backward ops and of ops that are not recomputable. `held[i]` is the set of storages at op i.
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
        """Per op, with one more entry for the end of the step: bytes of the held storages."""
        change = np.zeros(len(self._problem.ops) + 2, np.int64)
        fixed = ~self.movable & (self._from <= self._last)
        np.add.at(change, self._from[fixed], self._size[fixed])
        np.add.at(change, np.minimum(self._last[fixed], len(self._problem.ops)) + 1, -self._size[fixed])
        return np.cumsum(change[:-1])

    @cached_property
    def own_bytes(self) -> Ints:
        """Per op: held bytes plus its workspace and the storages it makes that are not movable."""
        beside = [
            op.workspace_bytes + sum(int(self._size[s]) for s in op.makes if not self.movable[s])
            for op in self._problem.ops
        ]
        return self.bytes[:-1] + np.array(beside, np.int64)

    @cached_property
    def needs(self) -> Ints:
        """Per op: a lower bound on the live bytes at its first evaluation, resident bytes included."""
        moved = [sum(int(self._size[s]) for s in {*op.reads, *op.makes} if self.movable[s]) for op in self._problem.ops]
        return self._problem.resident_bytes + self.own_bytes + np.array(moved, np.int64)
