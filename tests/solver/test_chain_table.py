import numpy as np

from memopt.solver.chain_plans import _ChainCosts, choose, fill, row

INF = float("inf")


def two_blocks() -> _ChainCosts:
    """Each block has one option, whose backward takes 3 slots; block 0 saves 4 slots, or hands 1 on and is rerun."""
    return _ChainCosts(
        start=np.array([0, 1, 2]),
        saved=np.array([4, 2]),
        forward=np.array([2, 2]),
        backward=np.array([3, 3]),
        alone=np.array([2, 2]),
        seconds=np.array([0.0, 0.0]),
        again_seconds=np.array([1.0, 1.0]),
        alone_seconds=np.array([1.0, 1.0]),
        unsaved=np.array([2, 2]),
        unsaved_seconds=np.array([1.0, 1.0]),
        first_held=np.array([0, 0]),
        again_held=np.array([0, 0]),
        extra=np.array([[0, 1, 0], [0, 0, 0], [0, 0, 0]]),
    )


def table() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    cost = np.full((3, 9), np.inf, np.float32)
    fill(two_blocks(), 9, cost)
    return cost


def test_rows_are_numbered_by_the_last_block() -> None:
    assert [row(0, 0), row(0, 1), row(1, 1), row(0, 2)] == [0, 1, 2, 3]


def test_less_memory_costs_a_rerun_of_the_first_block() -> None:
    cost = table()
    assert cost[row(1, 1)].tolist() == [INF] * 3 + [0.0] * 6
    assert cost[row(0, 0)].tolist() == [INF] * 3 + [1.0] * 6
    assert cost[row(0, 1)].tolist() == [INF] * 4 + [1.0] * 3 + [0.0] * 2


def test_the_choice_attains_the_cost() -> None:
    choices = [choose(two_blocks(), table(), 0, 1, memory) for memory in (3, 4, 6, 7)]
    assert choices == [0, 1, 1, -1]  # nothing fits; run block 0 unsaved twice; option 0
