"""A binary heap over two arrays that share their order: scores, and the items that have them (Williams, 1964)."""

from __future__ import annotations

from memopt.solver.arrays import Floats, Ints
from memopt.solver.native import native_part


@native_part
def heapify(items: Ints, scores: Floats, count: int) -> None:
    """Turn the first `count` entries into a heap, in place, with the smallest score at index 0."""
    for at in range(count // 2 - 1, -1, -1):
        sift_down(items, scores, at, count)


@native_part
def sift_down(items: Ints, scores: Floats, at: int, count: int) -> None:
    """Move the entry at index `at` down to its place in a heap of `count` entries that is otherwise in order."""
    item, score = items[at], scores[at]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and scores[child + 1] < scores[child]:
            child += 1
        if scores[child] >= score:
            break
        items[at], scores[at] = items[child], scores[child]
        at = child
    items[at], scores[at] = item, score
