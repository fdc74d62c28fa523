from unittest import mock

import numpy as np

from memopt.solver import search as searches
from memopt.solver.arrays import arrays_of
from memopt.solver.polish import LENGTH_EXPONENTS
from memopt.solver.search import NEAREST_POWERS, Candidate, Search, candidate
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step


def plan(evaluations: tuple[int, ...]) -> Candidate:
    return candidate(arrays_of(small_step()), "given", np.array(evaluations, np.int64))


def test_a_candidate_is_measured() -> None:
    assert (plan(SAVE_ALL).peak_bytes, plan(SAVE_ALL).added_seconds) == (112, 0.0)
    assert (plan(RECOMPUTED).peak_bytes, plan(RECOMPUTED).added_seconds) == (110, 1.0)


def test_the_best_is_the_fastest_offered_plan_that_fits() -> None:
    search = Search(arrays_of(small_step()), 110, enough_seconds=1.0)
    assert not search.offer(None)
    assert not search.offer(plan(SAVE_ALL))
    assert search.offer(plan((0, 1, 2, 0, 1, 3, 0, 4)))
    assert not search.done
    assert search.offer(plan(RECOMPUTED))
    assert not search.offer(plan(RECOMPUTED))
    assert search.done


def test_a_repair_brings_a_plan_within_the_cap_and_a_polish_uses_free_memory() -> None:
    search = Search(arrays_of(small_step()), 110)
    repaired = search.repaired(plan(SAVE_ALL), (1.0, 0.5))
    assert repaired is not None
    assert (tuple(repaired.evaluations), repaired.method) == (RECOMPUTED, "given, repaired")
    search = Search(arrays_of(small_step()), 112)
    search.polish(plan(RECOMPUTED))
    assert search.best is not None
    assert (tuple(search.best.evaluations), search.best.method) == (SAVE_ALL, "given, polished")


def test_the_same_evaluations_are_polished_once() -> None:
    search = Search(arrays_of(small_step()), 112)
    with mock.patch.object(searches, "polish", wraps=searches.polish) as polish:
        search.polish(plan(RECOMPUTED))
        search.repair(plan(RECOMPUTED), NEAREST_POWERS)  # there is room to save all, by each of the rules
    assert polish.call_count == 2 * len(LENGTH_EXPONENTS)
