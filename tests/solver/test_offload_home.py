"""Storages that lie on the host for the whole step, as frozen parameters do: brought before each use, never sent."""

from __future__ import annotations

import pytest

from memopt.solver import Infeasible, Link, OffloadPortfolio, Op, RematProblem, Schedule, Storage, simulate
from memopt.solver.problem import Offload
from memopt.solver.simulator import time_line
from tests.marks import slow

WEIGHT, ACTIVATION = 100, 10


def layers(count: int, *, home: int, forward_seconds: float = 1.0) -> RematProblem:
    """A chain of `count` layers whose forward and backward read a weight each; the first `home` weights lie on the
    host, and the others are resident."""
    storages = [Storage(f"w{i}", WEIGHT, home=True) for i in range(home)]
    ops = [Op(f"given {i}", 0.0, (), (i,), recomputable=False) for i in range(home)]
    ops.append(Op("begin", 0.0, (), (), recomputable=False))
    weights = [(i,) if i < home else () for i in range(count)]
    before: tuple[int, ...] = ()
    made = []
    for i in range(count):
        storages.append(Storage(f"a{i}", ACTIVATION))
        ops.append(Op(f"f{i}", forward_seconds, (*weights[i], *before), (len(storages) - 1,)))
        before = (len(storages) - 1,)
        made.append(len(storages) - 1)
    forward_ops = len(ops)
    for i in reversed(range(count)):
        storages.append(Storage(f"g{i}", ACTIVATION))
        ops.append(Op(f"b{i}", 2 * forward_seconds, (*weights[i], made[i], *before), (len(storages) - 1,)))
        before = (len(storages) - 1,)
    return RematProblem(tuple(ops), tuple(storages), forward_ops, resident_bytes=WEIGHT * (count - home))


@pytest.mark.parametrize("budget", [250, 330, 450, 700, 1000])
@pytest.mark.parametrize("rate", [slow(50.0), 200.0, slow(1e9)])
def test_a_chain_streams_its_weights(budget: int, rate: float) -> None:
    problem, link = layers(8, home=8), Link(rate)
    found = OffloadPortfolio(problem).solve(budget, link)
    simulation = simulate(problem, found.schedule, link)
    assert simulation.peak_bytes <= budget
    first = {offload.storage for offload in found.schedule.offloads if offload.out_after < 8}
    assert first >= set(range(8)), "each weight is brought once at least"
    assert found.host_bytes >= 8 * WEIGHT
    assert found.lower_bound_seconds <= found.added_seconds
    busy = sum(WEIGHT / rate for offload in found.schedule.offloads if offload.storage < 8)
    assert found.added_seconds >= WEIGHT / rate, "the first layer waits for its weight"
    assert simulation.seconds >= busy


def test_a_larger_budget_brings_less_often() -> None:
    link, moved = Link(100.0), []
    for budget in (250, 500, 950):
        schedule = OffloadPortfolio(layers(8, home=8)).solve(budget, link).schedule
        moved.append(sum(offload.storage < 8 for offload in schedule.offloads))
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1] == 8


def test_nothing_is_copied_out() -> None:
    problem = layers(2, home=2)
    offloads = (Offload(0, 0, 1, 2, 3), Offload(1, 1, 2, 3, 4))
    line = time_line(problem, Schedule(tuple(range(len(problem.ops))), offloads), Link(10.0))
    assert line.out == ((0.0, 0.0), (0.0, 0.0))
    assert line.back == ((0.0, 10.0), (10.0, 20.0))
    assert line.stall_seconds == 19.0, "the second transfer runs beside the first layer's second"


def test_the_host_has_no_room() -> None:
    problem = layers(8, home=8)
    assert OffloadPortfolio(problem).solve(300, Link(1e9, host_bytes=8 * WEIGHT)).host_bytes == 8 * WEIGHT
    with pytest.raises(Infeasible):
        OffloadPortfolio(problem).solve(300, Link(1e9, host_bytes=8 * WEIGHT - 1))


def test_the_smallest_budget_is_that_of_one_layer() -> None:
    problem = layers(8, home=8)
    least = OffloadPortfolio(problem).smallest(Link(100.0))
    assert least.peak_bytes <= 2 * WEIGHT + 4 * ACTIVATION
    with pytest.raises(Infeasible):
        OffloadPortfolio(problem).solve(WEIGHT, Link(100.0))
