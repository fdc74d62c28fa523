"""Slow and plain twins of the solvers, which share nothing with them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations

from memopt.solver.problem import RematProblem, Schedule


def naive_live_bytes(problem: RematProblem, schedule: Schedule) -> list[int]:
    """Live bytes at each evaluation, by asking of every version at every position whether it is alive."""
    order = schedule.evaluations
    versions = [(storage, born) for born, op in enumerate(order) for storage in problem.ops[op].makes]
    live = []
    for now, op in enumerate(order):
        total = problem.resident_bytes + problem.ops[op].workspace_bytes
        for storage, born in versions:
            if born <= now and (now == born or _read_later(problem, order, storage, born, now)):
                total += problem.storages[storage].bytes
        live.append(total)
    return live


def _read_later(problem: RematProblem, order: tuple[int, ...], storage: int, born: int, now: int) -> bool:
    maker = order[born]
    if problem.storages[storage].kept and maker not in order[:born]:
        return True
    for later in range(born + 1, len(order)):
        if later >= now and storage in problem.ops[order[later]].reads:
            return True
        if order[later] == maker:
            return False
    return False


def made_again(problem: RematProblem, needed: frozenset[int], present: set[int]) -> set[int]:
    """The ops that recompute the `needed` storages from those that are `present`."""
    pending, again = [s for s in needed if s not in present], set[int]()
    while pending:
        op = problem.producer[pending.pop()]
        if op not in again:
            again.add(op)
            pending += [s for s in problem.ops[op].reads if s not in present]
    return again


def closed_choices(problem: RematProblem, needed: frozenset[int]) -> Iterator[tuple[int, float]]:
    """(saved bytes, recompute seconds) of every saved set that is enough to have `needed` again."""
    forward = [s for op in problem.ops[: problem.forward_ops] for s in op.makes if not problem.storages[s].kept]
    kept = {s for s in range(len(problem.storages)) if problem.storages[s].kept}
    for saved in chain.from_iterable(combinations(forward, size) for size in range(len(forward) + 1)):
        again = made_again(problem, needed, {*saved, *kept})
        if all(problem.ops[op].recomputable for op in again):
            yield sum(problem.storages[s].bytes for s in saved), sum(problem.ops[op].seconds for op in again)


def optimum(problem: RematProblem, budget_bytes: int, most_states: int = 60_000) -> float | None:
    """The least added seconds of any schedule within the budget; None where there is none.

    Dijkstra over (first evaluations done, storages in memory); raises `OverflowError` past `most_states`. A second
    version of a kept storage counts only while it is made, so the optimum may be slightly optimistic.
    """
    sizes = [storage.bytes for storage in problem.storages]
    last_read = [-1] * len(sizes)
    for index, op in enumerate(problem.ops):
        for storage in op.reads:
            last_read[storage] = index
    useful = _useful(problem, last_read)
    queue: list[tuple[float, int, int, frozenset[int]]] = [(0.0, 0, 0, frozenset())]
    done: set[tuple[int, frozenset[int]]] = set()
    ticket = 0
    while queue:
        cost, _, first, memory = heapq.heappop(queue)
        if (first, memory) in done:
            continue
        done.add((first, memory))
        if len(done) > most_states:
            raise OverflowError
        if first == len(problem.ops):
            return cost
        for op_index in range(first + 1 if first < len(problem.ops) else first):
            op = problem.ops[op_index]
            again = op_index < first
            if again and (op_index >= problem.forward_ops or not op.recomputable or set(op.makes) <= memory):
                continue
            if not memory.issuperset(op.reads):
                continue
            copies = sum(sizes[s] for s in op.makes if again and problem.storages[s].kept)
            at_work = memory.union(op.makes)
            needs = problem.resident_bytes + op.workspace_bytes + copies + sum(sizes[s] for s in at_work)
            if needs <= budget_bytes:
                ticket += 1
                now = first if again else first + 1
                heapq.heappush(queue, (cost + again * op.seconds, ticket, now, at_work & useful[now]))
        for storage in memory:
            if not problem.storages[storage].kept and sizes[storage]:
                ticket += 1
                heapq.heappush(queue, (cost, ticket, first, memory - {storage}))
    return None


def _useful(problem: RematProblem, last_read: list[int]) -> list[frozenset[int]]:
    """By number of first evaluations done: storages that anything may still read, and kept ones."""
    useful = []
    for first in range(len(problem.ops) + 1):
        direct = {s for s in range(len(last_read)) if last_read[s] >= first or problem.storages[s].kept}
        for op in reversed(problem.ops[: problem.forward_ops]):
            if direct.intersection(op.makes):
                direct.update(op.reads)
        useful.append(frozenset(direct))
    return useful


@cache
def revolve(steps: int, slots: int) -> float:
    """Least forward steps that reversing a chain evaluates again (Griewank and Walther, 2000), its input being held.

    `steps` gradients, each needing the value that enters its step; `slots` values can be held beside the input.
    """
    if steps <= 1:
        return 0
    if slots == 0:
        return steps * (steps - 1) / 2
    return min(cut + revolve(steps - cut, slots - 1) + revolve(cut, slots) for cut in range(1, steps))
