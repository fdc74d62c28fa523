import numpy as np
import pytest

from memopt.solver.arrays import Arrays, arrays_of
from memopt.solver.native import native
from memopt.solver.replay import AWAY, EVALUATED, PRESENT, USED, RepairState, cost, drop, evaluate, start_replay
from tests.solver.small import RECOMPUTED, small_step


@native
def evaluated(arrays: Arrays, replay: RepairState, op: int) -> None:
    evaluate(arrays, replay, op)


@native
def dropped(arrays: Arrays, replay: RepairState, storage: int) -> None:
    drop(arrays, replay, storage)


@native
def cost_of(arrays: Arrays, replay: RepairState, storage: int) -> float:
    return cost(arrays, replay, storage)


def started() -> tuple[Arrays, RepairState]:
    arrays, seed = arrays_of(small_step()), np.array(RECOMPUTED)
    return arrays, start_replay(arrays, seed, 20, np.ones(5), np.ones(seed.size + 2))


def test_events_are_the_seeds_reads_and_recomputations() -> None:
    _, replay = started()
    assert replay.event_start.tolist() == [0, 3, 5, 6, 7, 7]
    # Storage a: read at 1, recomputed at 4, read at 5; b: read at 2 and 3; c: at 3; d: at 5.
    assert replay.events[:7].tolist() == [2, 9, 10, 4, 6, 6, 10]
    assert replay.scalars[USED] == 100


def test_bytes_in_use_follow_evaluations_and_evictions() -> None:
    arrays, replay = started()
    evaluated(arrays, replay, 0)
    evaluated(arrays, replay, 1)
    assert replay.scalars[[USED, EVALUATED, PRESENT, AWAY]].tolist() == [106, 2, 2, 0]
    dropped(arrays, replay, 0)
    assert replay.scalars[[USED, EVALUATED, PRESENT, AWAY]].tolist() == [102, 2, 1, 1]
    assert (replay.present[0], replay.place[:2].tolist(), replay.away[0]) == (1, [-1, 0], 0)


def test_a_storage_costs_its_op_and_its_missing_inputs() -> None:
    arrays, replay = started()
    for op in range(3):
        evaluated(arrays, replay, op)
    assert cost_of(arrays, replay, 1) == pytest.approx(2.0)
    dropped(arrays, replay, 0)
    assert cost_of(arrays, replay, 1) == pytest.approx(3.0)
    dropped(arrays, replay, 1)
    assert cost_of(arrays, replay, 2) == pytest.approx(7.0)
