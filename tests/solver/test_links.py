import numpy as np

from memopt.solver.arrays import arrays_of
from memopt.solver.links import NONE, Links, link, put_back, remove
from memopt.solver.native import native
from tests.solver.small import RECOMPUTED, RECOMPUTED_BYTES, small_step


@native
def removed(links: Links, i: int) -> tuple[int, int]:
    return remove(links, i)


@native
def restored(links: Links, count: int, logged: int) -> None:
    put_back(links, count, logged)


def test_versions_know_their_reads_and_evaluations_their_neighbours() -> None:
    links = link(arrays_of(small_step()), np.array(RECOMPUTED))
    assert links.before.tolist() == [NONE, NONE, NONE, NONE, 0, NONE]
    assert links.after.tolist() == [4, NONE, NONE, NONE, NONE, NONE]
    # The reads, in order: b reads a; c reads b; d reads b and c; e reads the second a and d.
    assert links.version.tolist() == [0, 1, 1, 2, 4, 3]
    assert links.head.tolist() == [0, 1, 3, 5, 4, NONE]
    assert links.tail.tolist() == [0, 2, 3, 5, 4, NONE]
    assert links.forever.tolist() == [False] * 5 + [True]
    assert links.live.tolist() == RECOMPUTED_BYTES


def test_a_removed_recomputation_is_read_from_the_one_before_and_can_be_put_back() -> None:
    links = link(arrays_of(small_step()), np.array(RECOMPUTED))
    whole = [column.tolist() for column in links[:-2]]
    count, logged = removed(links, 4)
    assert links.removed[:count].tolist() == [4]
    assert links.live[links.alive].tolist() == [104, 109, 107, 112, 110]
    assert links.version.tolist() == [0, 1, 1, 2, 0, 3]
    restored(links, count, logged)
    assert [column.tolist() for column in links[:-2]] == whole


def test_what_only_the_removed_recomputation_read_is_removed_with_it() -> None:
    links = link(arrays_of(small_step()), np.array((0, 1, 2, 0, 1, 3, 4)))
    count, _ = removed(links, 4)
    assert links.removed[:count].tolist() == [4]  # the second a is still read by e
    links = link(arrays_of(small_step()), np.array((0, 1, 2, 0, 1, 3, 0, 4)))
    count, _ = removed(links, 4)
    assert links.removed[:count].tolist() == [4, 3]
