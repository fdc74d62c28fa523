import math

import numpy as np

from memopt.solver.arrays import arrays_of
from memopt.solver.offload_search import OffloadCandidate, OffloadSearch
from memopt.solver.problem import Link
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step

ORDER = np.array(SAVE_ALL)


def search_at(cap_bytes: int, seconds: float, host_bytes: int | None = None) -> OffloadSearch:
    return OffloadSearch(arrays_of(small_step()), cap_bytes, Link(math.inf, seconds, host_bytes))


def test_a_value_that_is_too_much_is_offloaded() -> None:
    search = search_at(111, 0.5)
    assert search.consider("given", ORDER)
    assert search.best is not None
    assert search.best.added_seconds == 0.5  # d needs the memory, so the copy back begins after d
    assert search.best.offloads.tolist() == [[0, 1, 3, 4, 4]]
    assert search.consider("given", np.array(RECOMPUTED))  # recomputes too much to become the best


def test_without_room_on_the_host_nothing_fits() -> None:
    search = search_at(111, 0.5, host_bytes=3)
    assert not search.consider("given", ORDER)
    assert search.best is None


def test_only_a_faster_plan_is_taken() -> None:
    search, rows = search_at(111, 0.5, host_bytes=4), np.array([[0, 1, 3, 4, 4]])
    slow, fast = (OffloadCandidate("given", ORDER, rows, seconds) for seconds in (2.0, 1.0))
    assert [search.offer(slow), search.offer(fast), search.offer(slow)] == [True, True, False]
    assert search.offer_again(slow)  # timed over this link it adds half a second
    assert not search_at(111, 0.5, host_bytes=3).offer_again(fast)
