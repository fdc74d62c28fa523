import random

from hypothesis import given
from hypothesis import strategies as st

from memopt.solver.native import native
from memopt.solver.offload_place import _Queue, book, earliest_start, empty_queue, latest_start


@native
def earliest(queue: _Queue, release: float, seconds: float) -> float:
    return earliest_start(queue, release, seconds)


@native
def latest(queue: _Queue, deadline: float, seconds: float) -> float:
    return latest_start(queue, deadline, seconds)


@native
def booked(queue: _Queue, start: float, seconds: float) -> None:
    book(queue, start, seconds)


def test_transfers_go_where_the_queue_is_idle() -> None:
    queue = empty_queue(4)
    booked(queue, 2.0, 1.0)
    booked(queue, 5.0, 2.0)
    assert [earliest(queue, 0.0, 2.0), earliest(queue, 0.0, 3.0), earliest(queue, 2.5, 2.0)] == [0.0, 7.0, 3.0]
    assert [latest(queue, 9.0, 2.0), latest(queue, 6.0, 2.0), latest(queue, 6.0, 3.0)] == [7.0, 3.0, -1.0]
    booked(queue, 3.0, 2.0)
    assert (queue.stretches[0], *queue.begin[:3], *queue.end[:3]) == (3, 2.0, 3.0, 5.0, 3.0, 5.0, 7.0)
    assert [earliest(queue, 1.0, 2.0), latest(queue, 7.0, 2.0)] == [7.0, 0.0]


@given(st.integers(0, 10**6))
def test_agrees_with_a_list_of_seconds(number: int) -> None:
    """Whole seconds, so that a set of the busy ones says it all."""
    state = random.Random(number)
    queue, busy = empty_queue(30), set[int]()
    for _ in range(30):
        seconds, moment = state.randint(0, 3), state.randint(0, 30)
        if state.random() < 0.5:
            start = int(earliest(queue, float(moment), float(seconds)))
            wanted = next(s for s in range(moment, 200) if not busy & set(range(s, s + seconds)))
        else:
            start = int(latest(queue, float(moment), float(seconds)))
            wanted = next(s for s in range(moment - seconds, -50, -1) if not busy & set(range(s, s + seconds)))
        if seconds:
            assert start == wanted
            booked(queue, float(start), float(seconds))
            busy.update(range(start, start + seconds))
    stretches = int(queue.stretches[0])
    assert sum(queue.end[:stretches] - queue.begin[:stretches]) == len(busy)
