import numpy as np

from memopt.solver.arrays import arrays_of
from memopt.solver.search import Candidate, Progress, Search, candidate, search_on
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step

SLOW = (0, 1, 2, 0, 1, 3, 0, 4)  # adds 4 seconds, within 110 bytes


def searched(limit_seconds: float, enough_seconds: float = -1.0) -> tuple[Search, list[Progress]]:
    arrays = arrays_of(small_step())
    search, reports = Search(arrays, 110, enough_seconds), list[Progress]()

    def plan(evaluations: tuple[int, ...]) -> Candidate:
        return candidate(arrays, "given", np.array(evaluations, np.int64))

    search.offer(plan(SLOW))
    search_on(search, [plan(SAVE_ALL), plan(SLOW)], 0.0, limit_seconds, reports.append)
    return search, reports


def test_local_search_finds_the_best_plan_of_a_small_problem() -> None:
    search, reports = searched(1.0)
    assert search.best is not None
    assert (tuple(search.best.evaluations), search.best.added_seconds) == (RECOMPUTED, 1.0)
    assert [(one.added_seconds, one.lower_bound_seconds) for one in (reports[0], reports[-1])] == [
        (4.0, 0.0),
        (1.0, 0.0),
    ]


def test_without_time_nothing_changes() -> None:
    search, reports = searched(0.0)
    assert search.best is not None
    assert tuple(search.best.evaluations) == SLOW
    assert len(reports) in (1, 2)


def test_it_ends_with_a_plan_that_is_good_enough() -> None:
    search, reports = searched(10.0, enough_seconds=1.0)
    assert search.best is not None
    assert search.best.added_seconds == 1.0
    assert reports[-1].seconds < 5.0
