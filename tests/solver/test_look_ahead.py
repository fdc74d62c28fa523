import numpy as np

from memopt.solver.arrays import Arrays, arrays_of
from memopt.solver.native import native
from memopt.solver.repair import look_ahead, need_again
from memopt.solver.replay import LOOK, NEVER, NOW, RepairState, drop, evaluate, start_replay
from tests.solver.small import SAVE_ALL, small_step


@native
def look_before_d(arrays: Arrays, replay: RepairState) -> None:
    """Evaluate a, b and c of the small step, then look ahead for d."""
    for op in range(3):
        evaluate(arrays, replay, op)
    replay.scalars[NOW] = 3
    replay.stack[0] = 3
    look_ahead(arrays, replay, 1)


@native
def evict(arrays: Arrays, replay: RepairState, storage: int) -> None:
    drop(arrays, replay, storage)
    need_again(arrays, replay, storage)


def started(seed: tuple[int, ...]) -> tuple[Arrays, RepairState]:
    arrays = arrays_of(small_step())
    return arrays, start_replay(arrays, np.array(seed), 20, np.ones(5), np.ones(len(seed) + 2))


def test_needs_are_the_next_reads_of_the_seed() -> None:
    arrays, replay = started(SAVE_ALL)
    look_before_d(arrays, replay)
    assert replay.need[:3].tolist() == [4, 3, 3]
    assert (replay.pinned == replay.scalars[LOOK]).tolist() == [False, True, True, True, False]


def test_a_value_that_the_seed_recomputes_first_is_not_needed() -> None:
    arrays, replay = started((0, 1, 2, 3, 0, 4))
    look_before_d(arrays, replay)
    assert replay.need[:3].tolist() == [NEVER, 3, 3]


def test_the_inputs_of_an_evicted_value_are_needed_as_soon_as_the_value() -> None:
    arrays, replay = started(SAVE_ALL)
    look_before_d(arrays, replay)
    evict(arrays, replay, 1)
    assert replay.op_need[1] == 3
    assert replay.need[0] == 3
