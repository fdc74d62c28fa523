import math

import pytest

from memopt.solver.problem import Link, Offload, Schedule
from memopt.solver.simulator import time_line
from tests.solver.small import SAVE_ALL, small_step


@pytest.mark.parametrize(
    ("link", "stalled"),
    [
        (Link(math.inf), 0.0),
        (Link(4.0), 1.0),  # the copy out of 4 bytes runs from 3 to 4, and c waits for it
        (Link(math.inf, latency_seconds=0.5), 0.5),
        (Link(0.25), 16.0 + 8.0),  # out from 3 to 19; back from 23 to 39, while d ends at 31
        (Link(0.0), math.inf),
    ],
)
def test_compute_waits_for_both_copies(link: Link, stalled: float) -> None:
    offloads = (Offload(0, out_after=1, freed_before=2, fetch_from=3, back_before=4),)
    assert time_line(small_step(), Schedule(SAVE_ALL, offloads), link).stall_seconds == stalled


def test_a_queue_moves_one_storage_at_a_time_by_deadline() -> None:
    late, soon = Offload(0, 1, 3, 3, 4), Offload(1, 1, 2, 2, 3)
    # b's copy out runs from 3 to 5, and c waits until 5; a's runs from 5 to 9, and d waits for nothing (c ends at 9).
    # b is fetched from 5 to 7, before c ends; a from 9 to 13, before d ends.
    assert time_line(small_step(), Schedule(SAVE_ALL, (late, soon)), Link(1.0)).stall_seconds == 2.0


def test_when_everything_runs() -> None:
    late, soon = Offload(0, 1, 3, 3, 4), Offload(1, 1, 2, 2, 3)
    found = time_line(small_step(), Schedule(SAVE_ALL, (late, soon)), Link(1.0))
    assert found.out == ((5.0, 9.0), (3.0, 5.0))
    assert found.back == ((9.0, 13.0), (5.0, 7.0))
    assert found.starts[:3] == (0.0, small_step().ops[0].seconds, 5.0), "c waits for b's copy out"
    assert found.stall_seconds == 2.0
