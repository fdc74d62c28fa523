"""The minimum cut as a solver: one schedule for each vertex of the hull of saved bytes and recomputed seconds.

The just-in-time schedule of a saved set recomputes before each backward op what it misses.
"""

from __future__ import annotations

from collections.abc import Collection

from memopt.solver.hull import lower_hull
from memopt.solver.min_cut import CutNetwork
from memopt.solver.problem import PerProblem, RematProblem
from memopt.solver.schedule import Schedule


class MinimumCut:
    """Proposes the just-in-time schedules of the cuts on the lower hull, by rising saved bytes.

    They are the same at every budget; the portfolio takes those that fit and repairs the next larger ones.
    """

    name = "minimum cut"

    def __init__(self) -> None:
        self._schedules = PerProblem(_schedules)

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return self._schedules(problem)


def _schedules(problem: RematProblem) -> list[Schedule]:
    """The just-in-time schedules of the problem's lower hull."""
    return [just_in_time(problem, cut.saved) for cut in lower_hull(CutNetwork(problem))]


def just_in_time(problem: RematProblem, saved: Collection[int]) -> Schedule:
    """The forward in order, then each backward op, preceded by the recomputation of the storages that it misses.

    A recomputed storage is held until its last read, so every op runs at most twice. Kept storages and those that
    cannot be recomputed count as saved. Raises `ValueError` for a storage that is not in the problem.
    """
    unknown = [storage for storage in saved if not 0 <= storage < len(problem.storages)]
    if unknown:
        raise ValueError(f"storages {unknown} to save are not in the problem, which has {len(problem.storages)}")
    first = problem.forward_ops
    present = set(saved)
    for index, op in enumerate(problem.ops[:first]):
        present.update(s for s in op.makes if problem.storages[s].kept or not problem.ops[index].recomputable)
    evaluations = list(range(first))
    for index in range(first, len(problem.ops)):
        missing = _missing_ops(problem, index, present)
        for op_index in (*missing, index):
            evaluations.append(op_index)
            present.update(problem.ops[op_index].makes)
    return Schedule(tuple(evaluations))


def _missing_ops(problem: RematProblem, index: int, present: set[int]) -> list[int]:
    """The ops that make the storages that op `index` misses, given those `present`, in program order."""
    missing: set[int] = set()
    pending = [index]
    while pending:
        for storage in problem.ops[pending.pop()].reads:
            producer = problem.producer[storage]
            if storage not in present and producer not in missing:
                missing.add(producer)
                pending.append(producer)
    return sorted(missing)
