"""A schedule: the order in which ops are evaluated, some of them several times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from memopt.solver.problem import RematProblem


@dataclass(frozen=True)
class Schedule:
    """Op indices in the order of their evaluation.

    Every op's first evaluation comes in program order, each backward op is evaluated once, and forward ops may be
    evaluated again anywhere after their first time. A read binds to the latest evaluation of the storage's producer;
    a version dies at its last read (kept storages: never).
    """

    evaluations: tuple[int, ...]

    @classmethod
    def save_all(cls, problem: RematProblem) -> Schedule:
        """Every op once, in program order: what plain training does."""
        return cls(tuple(range(len(problem.ops))))

    def recomputed(self) -> dict[int, int]:
        """Op index → how many times it is evaluated again (only ops evaluated more than once)."""
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
