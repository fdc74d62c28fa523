import numpy as np

from memopt.solver.arrays import arrays_of
from memopt.solver.search import Candidate, Progress, Search, candidate, search_on
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step

SLOW = (0, 1, 2, 0, 1, 3, 0, 4)  # adds 4 seconds, within 110 bytes


def searched(limit_seconds: float) -> tuple[Search, list[Progress]]:
    arrays = arrays_of(small_step())
    search, reports = Search(arrays, 110), list[Progress]()

    def plan(evaluations: tuple[int, ...]) -> Candidate:
        return candidate(arrays, "given", np.array(evaluations, np.int64))

    search.offer(plan(SLOW))
    search_on(search, [plan(SAVE_ALL), plan(SLOW)], 0.0, limit_seconds, reports.append)
    return search, reports


def test_the_search_ends_where_nothing_better_is_found_for_long() -> None:
    search, reports = searched(30.0)
    assert search.best is not None
    assert (tuple(search.best.evaluations), search.best.added_seconds) == (RECOMPUTED, 1.0)
    assert (reports[0].added_seconds, reports[-1].added_seconds) == (4.0, 1.0)
    assert reports[-1].seconds < 30.0


def test_without_time_nothing_changes() -> None:
    search, reports = searched(0.0)
    assert search.best is not None
    assert tuple(search.best.evaluations) == SLOW
    assert len(reports) in (1, 2)
