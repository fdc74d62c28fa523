"""Random offloads, and slow and plain twins of what is done with them, which share nothing with the solvers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from memopt.solver.min_cut import just_in_time
from memopt.solver.problem import Link, Offload, RematProblem, Schedule
from memopt.solver.simulator import simulate
from tests.solver.reference import made_again


def random_offloads(state: random.Random, problem: RematProblem, schedule: Schedule) -> tuple[Offload, ...]:
    """Offloads of random storages at random positions, at most one of each storage."""
    offloads = []
    end = len(schedule.evaluations)
    for storage in range(len(problem.storages)):
        made = schedule.evaluations.index(problem.producer[storage])
        if problem.storages[storage].kept or end - made < 2 or state.random() < 0.6:
            continue
        out_after = state.randrange(made, end - 1)
        freed, fetch, back = sorted(state.randrange(out_after + 1, end) for _ in range(3))
        offloads.append(Offload(storage, out_after, freed, fetch, back))
    return tuple(offloads)


def naive_offload_bytes(problem: RematProblem, schedule: Schedule) -> list[int]:
    """Live bytes at each evaluation: for every copy on the device, when it comes to be and what uses it."""
    order = schedule.evaluations
    copies: list[tuple[int, float, int, list[int], bool]] = []  # storage, readable from, bytes from, uses, forever
    for at, op in enumerate(order):
        for storage in problem.ops[op].makes:
            copies.append((storage, at + 0.5, at, [at], problem.storages[storage].kept and op not in order[:at]))
    for offload in schedule.offloads:
        copies.append((offload.storage, offload.back_before, offload.fetch_from, [offload.back_before], False))

    def uses(storage: int, at: float) -> list[int]:
        return max((copy for copy in copies if copy[0] == storage and copy[1] <= at), key=lambda copy: copy[1])[3]

    for at, op in enumerate(order):
        for storage in problem.ops[op].reads:
            uses(storage, at).append(at)
    for offload in schedule.offloads:
        uses(offload.storage, offload.out_after + 0.5).append(offload.freed_before - 1)
    live = []
    for now, op in enumerate(order):
        total = problem.resident_bytes + problem.ops[op].workspace_bytes
        for storage, _, start, used, forever in copies:
            if start <= now and (forever or now <= max(used)):
                total += problem.storages[storage].bytes
        live.append(total)
    return live


def naive_stall_seconds(problem: RematProblem, schedule: Schedule, link: Link) -> float:
    """When each event happens, asked recursively of what it waits for; the end of compute beyond its seconds."""
    order, offloads = schedule.evaluations, schedule.offloads
    out_queue = sorted(offloads, key=lambda s: (s.out_after, s.freed_before, offloads.index(s)))
    back_queue = sorted(offloads, key=lambda s: (s.fetch_from, s.back_before, offloads.index(s)))
    known: dict[tuple[str, int], float] = {}

    def takes(offload: Offload) -> float:
        return link.transfer_seconds(problem.storages[offload.storage].bytes)

    def when(event: str, at: int) -> float:
        if (event, at) not in known:
            known[event, at] = _when(event, at)
        return known[event, at]

    def _when(event: str, at: int) -> float:
        if event == "out":  # the end of transfer `at` of the queue out
            return max(when("out", at - 1) if at else 0.0, when("end", out_queue[at].out_after)) + takes(out_queue[at])
        if event == "back":
            return max(when("back", at - 1) if at else 0.0, when("free", back_queue[at].fetch_from)) + takes(
                back_queue[at]
            )
        if event == "free":  # evaluation `at` is next, and what it frees is free
            frees = [when("out", i) for i, offload in enumerate(out_queue) if offload.freed_before == at]
            return max([when("end", at - 1) if at else 0.0, *frees])
        if event == "start":
            needs = [when("back", i) for i, offload in enumerate(back_queue) if offload.back_before == at]
            return max([when("free", at), *needs])
        return when("start", at) + problem.ops[order[at]].seconds

    if not order:
        return 0.0
    return when("end", len(order) - 1) - sum(problem.ops[op].seconds for op in order)


def every_offload(problem: RematProblem, schedule: Schedule) -> Iterator[tuple[Offload, ...]]:
    """All choices of at most one offload for each storage that is alive and unused for a time, at all positions."""
    for chosen in itertools.product(*_storage_choices(problem, schedule)):
        yield tuple(offload for offload in chosen if offload is not None)


def stays_of_all(problem: RematProblem, schedule: Schedule) -> int:
    """How many choices those are."""
    return math.prod(len(offloads) for offloads in _storage_choices(problem, schedule))


def _storage_choices(problem: RematProblem, schedule: Schedule) -> list[list[Offload | None]]:
    choices: list[list[Offload | None]] = []
    order = schedule.evaluations
    for storage, described in enumerate(problem.storages):
        if described.kept or described.bytes == 0:
            continue
        uses = [at for at, op in enumerate(order) if storage in (*problem.ops[op].reads, *problem.ops[op].makes)]
        offloads: list[Offload | None] = [None]
        for start, stop in itertools.pairwise(uses):
            pairs = itertools.combinations(range(start + 1, stop + 1), 2)
            offloads += [Offload(storage, start, freed, fetch, stop) for freed, fetch in pairs]
        choices.append(offloads)
    return choices


def least_stalls(problem: RematProblem, schedule: Schedule, budget_bytes: int, link: Link) -> float | None:
    """The least waiting of any offloads that bring this order of evaluations within the budget."""
    least: float | None = None
    for offloads in every_offload(problem, schedule):
        simulation = simulate(problem, Schedule(schedule.evaluations, offloads), link)
        if simulation.peak_bytes <= budget_bytes and (least is None or simulation.stall_seconds < least):
            least = simulation.stall_seconds
    return least


def least_of_all(problem: RematProblem, budget_bytes: int, link: Link) -> float:
    """The least added seconds of every saved set, the rest recomputed just in time, with any offloads."""
    forward = [s for op in problem.ops[: problem.forward_ops] for s in op.makes if not problem.storages[s].kept]
    best, seen = math.inf, set[tuple[int, ...]]()
    for size in range(len(forward) + 1):
        for saved in itertools.combinations(forward, size):
            schedule = just_in_time(problem, saved)
            recomputed = schedule.added_seconds(problem)
            if schedule.evaluations in seen or recomputed >= best or stays_of_all(problem, schedule) > 2_000:
                continue
            seen.add(schedule.evaluations)
            waits = least_stalls(problem, schedule, budget_bytes, link)
            best = best if waits is None else min(best, recomputed + waits)
    return best


def three_way_choices(
    problem: RematProblem, needed: frozenset[int], price: float, offload_seconds: list[float]
) -> Iterator[float]:
    """Each saved set's cost, every storage of it where it is cheaper."""
    forward = [s for op in problem.ops[: problem.forward_ops] for s in op.makes if not problem.storages[s].kept]
    kept = {s for s in range(len(problem.storages)) if problem.storages[s].kept}
    for size in range(len(forward) + 1):
        for saved in itertools.combinations(forward, size):
            again = made_again(problem, needed, {*saved, *kept})
            if all(problem.ops[op].recomputable for op in again):
                costs = (min(price * problem.storages[s].bytes, offload_seconds[s]) for s in saved)
                yield sum(problem.ops[op].seconds for op in again) + sum(costs)
