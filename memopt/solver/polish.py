"""Uses the memory that a schedule leaves free: removes recomputations whose values can be held instead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints
from memopt.solver.links import NONE, Links, death, link, put_back, remove
from memopt.solver.liveness import remove_dead
from memopt.solver.native import native, native_part


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

    Removals are tried by falling score: seconds saved, per byte held longer times the length of the hold to the power
    `length_exponent`. `noise` multiplies each op's score (for a local search). A schedule within the cap stays within.
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
