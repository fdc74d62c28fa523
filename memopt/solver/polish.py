"""Spends the memory that a schedule leaves unused: drops repeated evaluations whose values can be held instead."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints
from memopt.solver.links import NONE, Links, death, link, put_back, remove
from memopt.solver.liveness import remove_dead
from memopt.solver.native import native, native_part


class _Survey(NamedTuple):
    """Per evaluation, what dropping it would bring."""

    gain: Floats
    """Seconds of it and of what was evaluated again only for it: its dependents."""
    released: Ints
    """The most bytes that this frees at any evaluation before the first of them."""
    first: Ints
    """The first of them."""
    score: Floats


def polish(
    arrays: Arrays, evaluations: Ints, cap_bytes: int, length_exponent: float = 0.5, noise: Floats | None = None
) -> Ints:
    """The schedule without repeated evaluations that `cap_bytes` lets it do without.

    Candidates go by seconds saved for each byte held longer, times the length of that to the power `length_exponent`;
    `noise` multiplies each op's score (for a local search). Where the schedule is within the cap it stays so.
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
    """Whether `maker` repeats an op and `read` is the last read of all that it makes: then it hangs on the reader."""
    if links.before[maker] == NONE:
        return False
    for v in range(links.version_start[maker], links.version_start[maker + 1]):  # noqa: SIM110 (compiles faster)
        if links.tail[v] > read:  # reads are numbered in the order of the schedule
            return False
    return True


@native
def _drop_all(links: Links, survey: _Survey, order: Ints, cap_bytes: int) -> bool:
    """Try to drop each repeated evaluation in `order`; whether any could be."""
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
    """Whether what is held longer passes the cap before anything of what hangs on `i` is evaluated."""
    w = links.version_start[links.before[i]]
    for v in range(links.version_start[i], links.version_start[i + 1]):
        allowed = cap_bytes - links.size[v] + survey.released[i]
        if links.head[v] != NONE:
            for position in range(death(links, w) + 1, survey.first[i]):
                if links.live[position] > allowed and links.alive[position]:
                    return True
        w += 1
    return False
