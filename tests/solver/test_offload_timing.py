import numpy as np

from memopt.solver.arrays import arrays_of
from memopt.solver.offload_search import most_on_host, stalled_seconds
from tests.solver.small import SAVE_ALL, small_step

ORDER = np.array(SAVE_ALL)
A, B = [0, 1, 2, 3, 4], [1, 1, 2, 2, 3]


def test_compute_waits_for_both_copies() -> None:
    arrays = arrays_of(small_step())
    # Out from 3 to 19, while c could begin at 3; back from 23 to 39, while d ends at 31.
    assert stalled_seconds(arrays, ORDER, np.array([A]), np.full(5, 16.0)) == 16.0 + 8.0
    assert stalled_seconds(arrays, ORDER, np.array([A]), np.zeros(5)) == 0.0
    assert stalled_seconds(arrays, ORDER, np.array([A, B]), np.array([4.0, 2.0, 0.0, 0.0, 0.0])) == 6.0


def test_bytes_are_on_the_host_from_the_copy_out_to_the_next_read() -> None:
    arrays = arrays_of(small_step())
    assert most_on_host(arrays, ORDER, np.array([A])) == 4
    assert most_on_host(arrays, ORDER, np.array([A, B])) == 6
    assert most_on_host(arrays, ORDER, np.zeros((0, 5), np.int64)) == 0
