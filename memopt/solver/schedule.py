"""A schedule: the order in which ops run, some of them more than once, and the storages offloaded in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memopt.solver.problem import RematProblem


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
    after their first evaluation. A read binds to the latest evaluation of the storage's producer, and the version that
    an evaluation makes is live until its last read (the first version of a kept storage: until the end).
    """

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
                raise ValueError(f"evaluation {position} is op {index} of a problem that has {len(problem.ops)}")
            op = problem.ops[index]
            if index in seen:
                if index >= problem.forward_ops or not op.recomputable:
                    raise ValueError(f"evaluation {position} recomputes {op.name}, which must not be recomputed")
                continue
            if index != len(seen):
                raise ValueError(f"evaluation {position} is {op.name}, before the first evaluation of op {len(seen)}")
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
                raise ValueError(
                    f"{offload} names a storage that is not in the problem, which has {len(problem.storages)}"
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
                raise ValueError(f"{offload} must copy out, free, fetch and be back in this order, within the step")
            if offload.out_after < made_at[offload.storage]:
                raise ValueError(
                    f"{offload} copies {storage.name} before evaluation {made_at[offload.storage]} makes it"
                )
            if offload.out_after < back.get(offload.storage, 0):
                raise ValueError(f"{offload} begins before {storage.name} is back from an earlier offload")
            back[offload.storage] = offload.back_before
