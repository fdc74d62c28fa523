import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solver.arrays import Floats, Ints
from memopt.solver.native import native
from memopt.solver.repair import heapify, sift_down


@native
def take_all(items: Ints, scores: Floats) -> None:
    """Empty the heap; what leaves it first comes to lie last."""
    heapify(items, scores, items.size)
    for count in range(items.size - 1, -1, -1):
        items[0], items[count] = items[count], items[0]
        scores[0], scores[count] = scores[count], scores[0]
        sift_down(items, scores, 0, count)


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.integers(0, 20)))
def test_entries_leave_by_rising_score_with_what_they_belong_to(values: list[int]) -> None:
    items, scores = np.arange(len(values)), np.array(values, np.float64)
    take_all(items, scores)
    assert scores.tolist() == sorted(values, reverse=True)
    assert sorted(items.tolist()) == list(range(len(values)))
    assert [values[item] for item in items] == scores.tolist()
