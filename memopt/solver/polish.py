"""Two ways to change a schedule. `polish` removes recomputations whose values can be held instead, in memory that the
schedule leaves free. `ruin` has the schedule free a few held values at one place and recompute them before their reads.

A polish after a ruin uses the freed memory, perhaps for other values that are worth more: "ruin and recreate" (Schrimpf
et al., 2000) at one place of the schedule, while a repair under a smaller cap changes all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints, remove_dead
from memopt.solver.links import NONE, Links, death, link, put_back, remove
from memopt.solver.native import native, native_part

LENGTH_EXPONENTS = (0.0, 0.5, 1.0)


class _Survey(NamedTuple):
    """Per evaluation: an estimate of the effect of removing it together with the recomputations made only for it."""

    gain: Floats
    """Seconds of all these evaluations."""
    released: Ints
    """The most bytes that the removal frees at any position before the first of these evaluations."""
    first: Ints
    """Position of the first of these evaluations."""
    score: Floats
    """Gain per byte held longer, by which removals are ordered."""


def polish(
    arrays: Arrays, evaluations: Ints, cap_bytes: int, length_exponent: float = 0.5, noise: Floats | None = None
) -> Ints:
    """The schedule without the recomputations that can be removed while live bytes stay within `cap_bytes`.

    Removals are tried by falling score: the seconds saved / the sum of bytes · length^`length_exponent` over the values
    that are held longer, each by `length` evaluations. `noise` multiplies each op's score (for a local search). A
    schedule within the cap stays within.
    """
    evaluations = remove_dead(arrays, evaluations)
    links = link(arrays, evaluations)
    while True:
        count = evaluations.size
        survey = _Survey(np.zeros(count), np.zeros(count, np.int64), np.arange(count), np.zeros(count))
        _look(links, survey, length_exponent)
        score = survey.score if noise is None else survey.score * noise[evaluations]
        order = np.argsort(-score, kind="stable")
        if not _drop_all(links, survey, order, cap_bytes):
            return evaluations[links.alive]


def polish_at_random(arrays: Arrays, evaluations: Ints, cap_bytes: int, draw: np.random.Generator) -> Ints:
    """The schedule polished with random noise and one of `LENGTH_EXPONENTS`."""
    noise = np.exp(draw.normal(0.0, draw.choice((0.0, 0.1, 0.3, 1.0)), arrays.seconds.size))
    return polish(arrays, evaluations, cap_bytes, draw.choice(LENGTH_EXPONENTS), noise)


@native
def _look(links: Links, survey: _Survey, length_exponent: float) -> None:
    """Fill the survey, in which each evaluation is its own `first` and all other fields are 0 at first."""
    for i in range(links.alive.size):
        if not links.alive[i]:
            continue
        survey.gain[i] = links.seconds[i]
        for read in range(links.read_start[i], links.read_start[i + 1]):
            v = links.version[read]
            maker = links.maker[v]
            if links.tail[v] != read:
                continue
            if not _read_last(links, maker, read):
                survey.released[i] += links.size[v]
                continue
            survey.gain[i] += survey.gain[maker]
            survey.released[i] += survey.released[maker]
            survey.first[i] = min(survey.first[i], survey.first[maker])
        if links.before[i] == NONE:
            continue
        cost = 1.0
        w = links.version_start[links.before[i]]
        for v in range(links.version_start[i], links.version_start[i + 1]):
            if links.head[v] != NONE:
                cost += links.size[v] * max(i - death(links, w), 0) ** length_exponent
            w += 1
        survey.score[i] = (survey.gain[i] + 1e-12) / cost


@native_part
def _read_last(links: Links, maker: int, read: int) -> bool:
    """Whether `maker` is a recomputation and `read` the last read of its versions, so that it ends with the reader."""
    if links.before[maker] == NONE:
        return False
    for v in range(links.version_start[maker], links.version_start[maker + 1]):  # noqa: SIM110 (compiles faster)
        if links.tail[v] > read:  # reads are numbered in the order of the schedule
            return False
    return True


@native
def _drop_all(links: Links, survey: _Survey, order: Ints, cap_bytes: int) -> bool:
    """Try to remove each recomputation in `order`; returns whether any was removed."""
    any_dropped = False
    for i in order:
        if not links.alive[i] or links.before[i] == NONE or _hopeless(links, survey, i, cap_bytes):
            continue
        start = i
        w = links.version_start[links.before[i]]
        for v in range(links.version_start[i], links.version_start[i + 1]):
            if links.head[v] != NONE:
                start = min(start, death(links, w) + 1)
            w += 1
        count, logged = remove(links, i)
        fits = True
        for position in range(start, i):
            if links.live[position] > cap_bytes and links.alive[position]:
                fits = False
                break
        if fits:
            any_dropped = True
        else:
            put_back(links, count, logged)
    return any_dropped


@native_part
def _hopeless(links: Links, survey: _Survey, i: int, cap_bytes: int) -> bool:
    """Whether removing `i` surely passes the cap, at a position before the first evaluation made only for `i`."""
    w = links.version_start[links.before[i]]
    for v in range(links.version_start[i], links.version_start[i + 1]):
        allowed = cap_bytes - links.size[v] + survey.released[i]
        if links.head[v] != NONE:
            for position in range(death(links, w) + 1, survey.first[i]):
                if links.live[position] > allowed and links.alive[position]:
                    return True
        w += 1
    return False


_UNKNOWN, _NEVER = -2, -1


def ruin(arrays: Arrays, evaluations: Ints, draw: np.random.Generator) -> Ints:
    """The schedule in which up to four values are freed and recomputed before their next reads.

    These values are drawn at random from those that are held across one random position of the backward.
    """
    backward = np.flatnonzero(evaluations >= arrays.forward_ops)
    if backward.size == 0:
        return evaluations
    position = int(backward[int(draw.integers(backward.size))])
    reads = next_reads(arrays, evaluations, position)
    can_go = arrays.repeatable[arrays.producer] & ~arrays.kept & (arrays.size > 0)
    droppable = np.flatnonzero((reads > position) & can_go)
    if droppable.size == 0:
        return evaluations
    weight = arrays.size[droppable] * (reads[droppable] - position) ** 0.5
    count = min(int(draw.integers(1, 5)), droppable.size)
    chosen = draw.choice(droppable, count, replace=False, p=weight / weight.sum())
    for storage in sorted(chosen.tolist(), key=lambda s: -int(reads[s])):
        at = int(reads[storage])
        evaluations = np.insert(evaluations, at, _ops_to_recompute(arrays, evaluations, storage, at))
    return evaluations


def _ops_to_recompute(arrays: Arrays, evaluations: Ints, storage: int, at: int) -> list[int]:
    """The ops that recompute `storage` right before position `at` from the values in memory there, in order."""
    reads = next_reads(arrays, evaluations, at)
    ops = {int(arrays.producer[storage])}
    pending = list(ops)
    while pending:
        op = pending.pop()
        for read in arrays.reads[arrays.read_start[op] : arrays.read_start[op + 1]].tolist():
            producer = int(arrays.producer[read])
            if reads[read] < 0 and not arrays.kept[read] and arrays.repeatable[producer] and producer not in ops:
                ops.add(producer)
                pending.append(producer)
    return sorted(ops)


def next_reads(arrays: Arrays, evaluations: Ints, start: int) -> Ints:
    """Per storage: the first position from `start` on that reads the version made before `start`, or -1."""
    reads = np.full(arrays.size.size, _UNKNOWN, np.int64)
    _find_next_reads(arrays, evaluations, start, reads)
    return np.maximum(reads, _NEVER)


@native
def _find_next_reads(arrays: Arrays, evaluations: Ints, start: int, reads: Ints) -> None:
    """Fill `reads`, which must be `_UNKNOWN` for all storages at first; a version without a read may stay so."""
    for position in range(start, evaluations.size):
        op = evaluations[position]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            if reads[arrays.reads[at]] == _UNKNOWN:
                reads[arrays.reads[at]] = position
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            if reads[arrays.makes[at]] == _UNKNOWN:
                reads[arrays.makes[at]] = _NEVER
