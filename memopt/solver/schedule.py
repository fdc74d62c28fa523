"""A schedule: the order in which ops run, some of them more than once, and what is offloaded in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memopt.solver.problem import RematProblem


@dataclass(frozen=True, slots=True)
class Offload:
    """A storage copied to the host and back. The other fields are positions in `Schedule.evaluations`, counted from 0.

    Compute waits before `freed_before` until the copy out is done, and before `back_before` until the copy back is. So
    the bytes at each position do not depend on how fast the link really is; only the seconds do.
    """

    storage: int
    out_after: int
    """The copy out joins its queue when this evaluation is done; it copies the version that is latest then."""
    freed_before: int
    """From this evaluation on the version's bytes are free, unless something still reads it."""
    fetch_from: int
    """The copy back joins its queue when this evaluation is next; its bytes are taken from here on."""
    back_before: int
    """From this evaluation on, reads bind to what was fetched, until the producer is evaluated again."""


@dataclass(frozen=True)
class Schedule:
    """Op indices in the order in which they run, and offloads.

    Every op's first evaluation comes in program order, each backward op is evaluated once, and forward ops may be
    recomputed anywhere after their first evaluation. A read binds to the latest evaluation of the storage's producer;
    a version dies at its last read (kept storages: never).
    """

    evaluations: tuple[int, ...]
    offloads: tuple[Offload, ...] = ()
    """Transfers of one direction that start at the same position go by their deadlines, then in this order."""

    @classmethod
    def save_all(cls, problem: RematProblem) -> Schedule:
        """Every op once, in program order: what plain training does."""
        return cls(tuple(range(len(problem.ops))))

    def recomputed(self) -> dict[int, int]:
        """Op index → how many times it is recomputed; only ops that are."""
        return {op: count - 1 for op, count in Counter(self.evaluations).items() if count > 1}

    def added_seconds(self, problem: RematProblem) -> float:
        """Seconds of all evaluations beyond each op's first."""
        return sum(problem.ops[op].seconds * again for op, again in self.recomputed().items())

    def check(self, problem: RematProblem) -> None:
        """Raise `ValueError` where the schedule breaks a rule of the problem."""
        seen: set[int] = set()
        for position, index in enumerate(self.evaluations):
            op = problem.ops[index]
            if index in seen:
                if index >= problem.forward_ops or not op.recomputable:
                    raise ValueError(f"evaluation {position} repeats {op.name}, which must not be evaluated twice")
                continue
            if index != len(seen):
                raise ValueError(f"evaluation {position} is {op.name}, before the first of op {len(seen)}")
            seen.add(index)
        if len(seen) != len(problem.ops):
            raise ValueError(f"{len(problem.ops) - len(seen)} ops are never evaluated")
        self._check_offloads(problem)

    def _check_offloads(self, problem: RematProblem) -> None:
        made_at: dict[int, int] = {}
        for position, index in enumerate(self.evaluations if self.offloads else ()):
            for made in problem.ops[index].makes:
                made_at.setdefault(made, position)
        back: dict[int, int] = {}
        for offload in sorted(self.offloads, key=lambda offload: offload.out_after):
            if not 0 <= offload.storage < len(problem.storages):
                raise ValueError(f"{offload} is of a storage that is not in the problem, with {len(problem.storages)}")
            storage = problem.storages[offload.storage]
            if storage.kept or not storage.movable:
                why = "a result of the step, which must stay on the device" if storage.kept else "which cannot be moved"
                raise ValueError(f"{offload} is of {storage.name}, {why}")
            if (
                not offload.out_after
                < offload.freed_before
                <= offload.fetch_from
                <= offload.back_before
                < len(self.evaluations)
            ):
                raise ValueError(
                    f"{offload} must go out, be freed, be fetched and be back in this order, within the step"
                )
            if offload.out_after < made_at[offload.storage]:
                raise ValueError(
                    f"{offload} copies {storage.name} before evaluation {made_at[offload.storage]} makes it"
                )
            if offload.out_after < back.get(offload.storage, 0):
                raise ValueError(f"{offload} begins before {storage.name} is back from an earlier offload")
            back[offload.storage] = offload.back_before
