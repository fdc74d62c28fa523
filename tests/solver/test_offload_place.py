import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, random_schedule, unet
from memopt.solver.arrays import arrays_of, to_array
from memopt.solver.offload_place import Placer
from memopt.solver.offload_search import most_on_host, stalled_seconds
from memopt.solver.problem import Link, Offload, RematProblem, Schedule
from memopt.solver.simulator import simulate


def place(
    problem: RematProblem, schedule: Schedule, cap_bytes: int, link: Link, speedup: float = 1.0
) -> Schedule | None:
    """The schedule with offloads, planned for a link that many times as fast; checked against the simulator."""
    arrays, evaluations = arrays_of(problem), to_array(schedule)
    seconds = np.array([link.transfer_seconds(storage.bytes) for storage in problem.storages])
    rows = Placer(arrays, evaluations).place(cap_bytes, seconds / speedup, link.host_bytes)
    if rows is None:
        return None
    placed = Schedule(schedule.evaluations, tuple(Offload(*row) for row in rows.tolist()))
    simulation = simulate(problem, placed, link)
    assert simulation.peak_bytes <= cap_bytes
    assert simulation.stall_seconds == pytest.approx(stalled_seconds(arrays, evaluations, rows, seconds))
    assert simulation.host_bytes == most_on_host(arrays, evaluations, rows)
    return placed


@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.sampled_from([1.0, 3.0, 1e9]))
def test_what_it_places_fits_and_hides(number: int, share: float, speedup: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 10))
    schedule = random_schedule(state, problem)
    link = Link(state.choice([1.0, 10.0, 100.0]), state.choice([0.0, 0.2]), state.choice([None, 50]))
    cap_bytes = int(share * simulate(problem, schedule).peak_bytes)
    placed = place(problem, schedule, cap_bytes, link, speedup)
    if placed is not None and speedup == 1.0:
        assert simulate(problem, placed, link).stall_seconds <= 1e-12


def test_a_chain_sends_its_earliest_values_away_when_memory_ends() -> None:
    placed = place(chain(8), Schedule.save_all(chain(8)), 60, Link(10.0))
    assert placed is not None
    rows = [(o.storage, o.out_after, o.freed_before, o.fetch_from, o.back_before) for o in placed.offloads]
    assert rows == [(0, 1, 6, 12, 15), (1, 2, 7, 11, 14), (2, 3, 9, 10, 13)]
    assert simulate(chain(8), placed, Link(10.0)).live_bytes.tolist() == [
        *(10, 20, 30, 40, 50, 60, 60, 60),
        *(54, 54, 60, 60, 60, 50, 40, 30),
    ]


def test_nothing_is_offloaded_where_all_fits() -> None:
    problem = unet()
    placed = place(
        problem, Schedule.save_all(problem), simulate(problem, Schedule.save_all(problem)).peak_bytes, Link(1e9)
    )
    assert placed is not None
    assert placed.offloads == ()


def test_a_host_without_room_and_a_link_that_is_too_slow_are_refused() -> None:
    problem, schedule = chain(8), Schedule.save_all(chain(8))
    assert place(problem, schedule, 60, Link(10.0, host_bytes=30)) is not None
    assert place(problem, schedule, 60, Link(10.0, host_bytes=29)) is None
    assert place(problem, schedule, 60, Link(1.0)) is None
    late = place(problem, schedule, 60, Link(1.0), speedup=100.0)
    assert late is not None
    assert simulate(problem, late, Link(1.0)).stall_seconds > 0
