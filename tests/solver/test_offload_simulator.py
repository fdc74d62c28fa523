import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import random_problem, random_schedule
from memopt.solver.problem import Link, Offload, Op, RematProblem, Schedule, Storage
from memopt.solver.simulator import simulate
from tests.solver.offloading import naive_offload_bytes, naive_stall_seconds, random_offloads


def skip() -> RematProblem:
    """a and b are made early, and read after c, d and e: by f and g. Each op makes one storage."""
    storages = tuple(Storage(name, size) for name, size in zip("abcdefg", (10, 20, 1, 1, 1, 1, 1), strict=True))
    ops = (
        Op("a", 1.0, (), (0,)),
        Op("b", 1.0, (0,), (1,)),
        Op("c", 1.0, (1,), (2,)),
        Op("d", 1.0, (2,), (3,)),
        Op("e", 1.0, (3,), (4,)),
        Op("f", 1.0, (4, 1), (5,)),
        Op("g", 1.0, (5, 0), (6,)),
    )
    return RematProblem(ops, storages, forward_ops=4, resident_bytes=100)


ALL = tuple(range(7))


def test_what_is_on_the_host_is_not_on_the_device() -> None:
    plain = simulate(skip(), Schedule(ALL))
    assert plain.live_bytes.tolist() == [110, 130, 131, 132, 132, 132, 112]
    a = Offload(0, out_after=1, freed_before=3, fetch_from=5, back_before=6)
    simulation = simulate(skip(), Schedule(ALL, (a,)), Link(10.0))
    assert simulation.live_bytes.tolist() == [110, 130, 131, 122, 122, 132, 112]
    assert (simulation.stall_seconds, simulation.added_seconds, simulation.host_bytes) == (0.0, 0.0, 10)


@pytest.mark.parametrize(
    ("bandwidth", "stall"),
    [
        (10.0, 0.0),  # out from 2 to 3, back from 5 to 6
        (5.0, 2.0),  # out until 4 (freed at 3), back from 6 to 8 (needed at 7)
        (4.0, 3.0),
        (math.inf, 0.0),
        (0.0, math.inf),
    ],
)
def test_compute_waits_for_a_slow_link(bandwidth: float, stall: float) -> None:
    a = Offload(0, out_after=1, freed_before=3, fetch_from=5, back_before=6)
    simulation = simulate(skip(), Schedule(ALL, (a,)), Link(bandwidth))
    assert simulation.stall_seconds == simulation.added_seconds == stall
    assert simulation.seconds == 7.0 + stall


def test_each_direction_moves_one_storage_at_a_time() -> None:
    # Out: a from 2 to 3, b from 3 to 5. Compute is at d (position 3) at 3, must wait for b until 5: 2 seconds.
    # Back: b from 5 (d is next) to 7, needed by f at 7: no wait. a from 7 to 8, needed by g at 8: no wait.
    a = Offload(0, out_after=1, freed_before=3, fetch_from=4, back_before=6)
    b = Offload(1, out_after=2, freed_before=3, fetch_from=3, back_before=5)
    simulation = simulate(skip(), Schedule(ALL, (a, b)), Link(10.0))
    assert simulation.stall_seconds == 2.0
    assert simulation.host_bytes == 30
    # d and e now end at 6 and 7; with one second of latency more each way every transfer takes longer:
    # a out 2 to 4, b out 4 to 7, d waits 4 seconds until 7; b back 7 to 10, f waits from 9 to 10; a back 10 to 12,
    # g waits from 11 to 12.
    assert simulate(skip(), Schedule(ALL, (a, b)), Link(10.0, latency_seconds=1.0)).stall_seconds == 6.0


def test_a_stay_may_be_fetched_in_time_to_be_copied_out_again() -> None:
    first = Offload(1, out_after=2, freed_before=3, fetch_from=4, back_before=4)
    again = Offload(1, out_after=4, freed_before=5, fetch_from=5, back_before=5)
    simulation = simulate(skip(), Schedule(ALL, (first, again)), Link(math.inf))
    assert simulation.live_bytes.tolist() == [110, 130, 131, 112, 132, 132, 112]


def test_a_read_in_between_keeps_the_version_on_the_device() -> None:
    early = Offload(1, out_after=1, freed_before=2, fetch_from=4, back_before=5)
    simulation = simulate(skip(), Schedule(ALL, (early,)), Link(math.inf))
    assert simulation.live_bytes.tolist() == [110, 130, 131, 112, 132, 132, 112]  # c still reads b at position 2


@given(st.integers(0, 10**6))
def test_agrees_with_a_naive_count(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 8))
    plain = random_schedule(state, problem)
    schedule = Schedule(plain.evaluations, random_offloads(state, problem, plain))
    link = Link(state.choice([0.5, 5.0, 50.0, math.inf]), state.choice([0.0, 0.3]))
    simulation = simulate(problem, schedule, link)
    assert simulation.live_bytes.tolist() == naive_offload_bytes(problem, schedule)
    assert simulation.stall_seconds == pytest.approx(naive_stall_seconds(problem, schedule, link))
    assert simulation.added_seconds == pytest.approx(schedule.added_seconds(problem) + simulation.stall_seconds)
    slower = Link(link.bytes_per_second * 0.7, link.latency_seconds)
    assert simulate(problem, schedule, slower).stall_seconds >= simulation.stall_seconds - 1e-9


@pytest.mark.parametrize(
    ("offloads", "said"),
    [
        ((Offload(0, 1, 1, 5, 6),), "needs out_after"),
        ((Offload(0, 1, 4, 3, 6),), "needs out_after"),
        ((Offload(0, 1, 3, 5, 7),), "needs out_after"),
        ((Offload(1, 0, 3, 4, 5),), "copies b before evaluation 1 makes it"),
        ((Offload(9, 0, 3, 4, 5),), "not among the problem"),
        ((Offload(1, 2, 3, 4, 5), Offload(1, 4, 5, 5, 6)), "before b is back"),
    ],
)
def test_refuses_invalid_offloads(offloads: tuple[Offload, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate(skip(), Schedule(ALL, offloads), Link(1.0))


def test_refuses_to_move_results_to_do_without_a_link_and_to_overfill_the_host() -> None:
    problem = skip()
    kept = RematProblem(problem.ops, (Storage("a", 10, kept=True), *problem.storages[1:]), 4)
    schedule = Schedule(ALL, (Offload(0, 1, 3, 5, 6),))
    with pytest.raises(ValueError, match="must stay on the device"):
        simulate(kept, schedule, Link(1.0))
    with pytest.raises(ValueError, match="pass the link"):
        simulate(problem, schedule)
    with pytest.raises(ValueError, match="10 bytes on the host, which has room for 9"):
        simulate(problem, schedule, Link(1.0, host_bytes=9))
