from dataclasses import replace

from memopt.solver.arrays import arrays_of, pack
from tests.solver.small import small_step


def test_lists_are_packed_with_their_starts() -> None:
    start, values = pack([[3, 1], [], [2]])
    assert (start.tolist(), values.tolist()) == ([0, 2, 2, 3], [3, 1, 2])
    start, values = pack([])
    assert (start.tolist(), values.tolist()) == ([0], [])


def test_the_arrays_of_a_step() -> None:
    arrays = arrays_of(small_step())
    assert (arrays.forward_ops, arrays.resident_bytes) == (3, 100)
    assert arrays.seconds.tolist() == [1, 2, 4, 8, 16]
    assert arrays.workspace.tolist() == [0, 3, 0, 0, 0]
    assert arrays.repeatable.tolist() == [True, True, True, False, False]
    assert (arrays.read_start.tolist(), arrays.reads.tolist()) == ([0, 0, 1, 2, 4, 6], [0, 1, 1, 2, 0, 3])
    assert arrays.size.tolist() == [4, 2, 1, 5, 1]
    assert arrays.kept.tolist() == [False] * 4 + [True]
    assert arrays.movable.tolist() == [True] * 4 + [False]
    assert (arrays.reader_start.tolist(), arrays.readers.tolist()) == ([0, 1, 2, 2, 2, 2], [1, 2])


def test_a_storage_that_is_read_twice_is_listed_once() -> None:
    problem = small_step()
    twice = replace(problem, ops=(problem.ops[0], replace(problem.ops[1], reads=(0, 0)), *problem.ops[2:]))
    assert arrays_of(twice).reads.tolist() == arrays_of(problem).reads.tolist()
