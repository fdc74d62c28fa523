"""What a user's solver may do, and what the portfolio makes of it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

import pytest

from examples.models.exact import solve_exactly
from examples.models.problems import chain, random_problem, transformer
from memopt.solver import (
    Infeasible,
    Link,
    Offload,
    OffloadPortfolio,
    Portfolio,
    RematProblem,
    Schedule,
    Solver,
    SolverError,
    simulate,
)
from memopt.solver.protocol import MOST_CANDIDATES
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step


@dataclass
class Fixed:
    """Proposes the same schedules at every budget and counts how often it is asked."""

    schedules: Iterable[object]
    name: str = "fixed"
    asked: list[int] = field(default_factory=list)

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterator[Schedule]:
        self.asked.append(budget_bytes)
        yield from self.schedules  # type: ignore[misc]


@dataclass(frozen=True)
class Raising:
    name: str = "raising"

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterator[Schedule]:
        yield Schedule.save_all(problem)
        raise KeyError("layer 3")


class Nameless:
    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterator[Schedule]:
        yield Schedule.save_all(problem)


def plain_peak(problem: RematProblem) -> int:
    return simulate(problem, Schedule.save_all(problem)).peak_bytes


def test_a_faster_schedule_of_a_users_solver_wins_under_its_name() -> None:
    """ "fast" finds a slower schedule for this problem than the exact reference does."""
    problem = random_problem(random.Random(101), 13)
    budget_bytes = 257
    exact = solve_exactly(problem, budget_bytes, seconds=20).schedule
    assert exact is not None
    without = Portfolio(problem).solve(budget_bytes, "fast")
    solution = Portfolio(problem, [Fixed([exact], "mine")]).solve(budget_bytes, "fast")
    assert simulate(problem, exact).added_seconds < without.added_seconds
    assert solution.method == "mine"
    assert solution.schedule == exact
    assert solution.added_seconds == simulate(problem, exact).added_seconds


@pytest.mark.parametrize("effort", ["fast", "default"])
def test_useless_proposals_change_nothing(effort: str) -> None:
    problem = transformer(3)
    budget_bytes = int(0.5 * plain_peak(problem))
    useless = Fixed([Schedule.save_all(problem)])
    solution = Portfolio(problem, [useless, Fixed([], "silent")]).solve(budget_bytes, effort)  # type: ignore[arg-type]
    without = Portfolio(problem).solve(budget_bytes, effort)  # type: ignore[arg-type]
    assert useless.asked == [budget_bytes]
    assert solution.added_seconds <= without.added_seconds
    assert solution.peak_bytes <= budget_bytes


def test_a_budget_that_only_the_users_solver_meets_is_solved() -> None:
    """The portfolio's own smallest peak is made larger by hiding the problem's smallest schedule from it."""
    problem = chain(10)
    portfolio = Portfolio(problem)
    least = portfolio.smallest()
    portfolio = Portfolio(problem, [Fixed([least.schedule], "mine")])
    portfolio._own_smallest = portfolio._baselines[0]
    assert portfolio.smallest().method == "mine"
    assert portfolio.solve(least.peak_bytes).peak_bytes <= least.peak_bytes
    with pytest.raises(Infeasible) as refusal:
        portfolio.solve(portfolio.smallest().peak_bytes - 1)
    assert refusal.value.smallest_peak_bytes == least.peak_bytes


def test_what_raises_is_named() -> None:
    problem = chain(6)
    with pytest.raises(SolverError, match="solver 'raising' raised KeyError: 'layer 3'") as error:
        Portfolio(problem, [Raising()]).solve(plain_peak(problem))
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        ([0, 1, 2], "proposed a value of type list, not a memopt.solver.Schedule"),
        (None, "proposed a value of type NoneType"),
        (Schedule((0, 1)), "an invalid schedule of the problem: .* the first that is missing is .*"),
        (Schedule((1, 0)), "although op 0 comes before it"),
        (Schedule((0, 10**6)), "an invalid schedule of the problem"),
        (Schedule(("first",)), "an invalid schedule of the problem"),  # type: ignore[arg-type]
    ],
)
def test_nonsense_is_named(proposal: object, message: str) -> None:
    problem = chain(6)
    with pytest.raises(SolverError, match=f"solver 'fixed' .*{message}"):
        Portfolio(problem, [Fixed([proposal])]).solve(plain_peak(problem))


@pytest.mark.parametrize("solver", [Fixed, Nameless(), object(), Fixed([], ""), Fixed([], "a, b"), Fixed([], 3)])  # type: ignore[arg-type]
def test_what_is_no_solver_is_refused_at_once(solver: Solver) -> None:
    with pytest.raises(SolverError):
        Portfolio(chain(4), [solver])


def test_an_endless_solver_is_read_so_far() -> None:
    problem = chain(4)
    portfolio = Portfolio(problem, [Fixed(repeat(Schedule.save_all(problem)))])
    assert len(portfolio.users_schedules(0)) == MOST_CANDIDATES


def test_a_users_offloads_are_judged_over_the_link() -> None:
    problem = chain(12)
    link = Link(5.0)
    budget_bytes = int(0.6 * plain_peak(problem))
    own = OffloadPortfolio(problem).solve(budget_bytes, link)
    known = OffloadPortfolio(problem).solve(budget_bytes, link).schedule
    assert known.offloads
    mine = OffloadPortfolio(problem, Portfolio(problem, [Fixed([known], "mine")]))
    assert mine.solve(budget_bytes, link).added_seconds <= own.added_seconds
    # Over no link, or where the host has no room, it is dropped.
    for poor in (Link(0.0), Link(5.0, host_bytes=1)):
        portfolio = Portfolio(problem, [Fixed([known])])
        assert OffloadPortfolio(problem, portfolio).solve(budget_bytes, poor).added_seconds < 1e9
    assert not Portfolio(problem, [Fixed([known])]).solve(budget_bytes).schedule.offloads


def test_a_users_offloads_win_under_its_name() -> None:
    """One value is offloaded at no cost: with nothing else tried, the schedule itself is the solution."""
    problem = chain(12)
    peak_bytes = plain_peak(problem)
    schedule = Schedule(tuple(range(len(problem.ops))), (Offload(0, 1, 3, len(problem.ops) - 3, len(problem.ops) - 1),))
    budget_bytes = simulate(problem, schedule, Link(1e9)).peak_bytes
    assert budget_bytes < peak_bytes
    portfolio = Portfolio(problem, [Fixed([schedule], "mine")])
    solution = OffloadPortfolio(problem, portfolio).solve(budget_bytes, Link(1e9), "fast")
    assert solution.method == "mine"
    assert solution.added_seconds == 0.0


def test_a_refusal_tells_both_figures_and_the_op() -> None:
    refusal = Infeasible(smallest_peak_bytes=110, floor_bytes=108, dominating_op=3)
    assert (refusal.smallest_peak_bytes, refusal.floor_bytes, refusal.dominating_op) == (110, 108, 3)
    assert str(refusal) == (
        "no schedule fits the budget: the smallest peak found is 110 bytes, "
        "and no schedule can go below 108 bytes, which op 3 needs"
    )


def test_a_solvers_error_is_a_value_error() -> None:
    assert issubclass(SolverError, ValueError)


class Counting:
    """Proposes the given orders and lists the budgets at which it is asked."""

    def __init__(self, name: str, *orders: tuple[int, ...]) -> None:
        self.name = name
        self.orders = orders
        self.asked: list[int] = []

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterator[Schedule]:
        self.asked.append(budget_bytes)
        return map(Schedule, self.orders)


def test_proposals_come_in_the_solvers_order_with_their_names() -> None:
    portfolio = Portfolio(small_step(), [Counting("one", RECOMPUTED, SAVE_ALL), Counting("two", SAVE_ALL)])
    proposals = [("one", Schedule(RECOMPUTED)), ("one", Schedule(SAVE_ALL)), ("two", Schedule(SAVE_ALL))]
    assert portfolio.users_schedules(110) == proposals


def test_solvers_are_asked_again_only_at_another_budget() -> None:
    solver = Counting("one", SAVE_ALL)
    portfolio = Portfolio(small_step(), [solver])
    for budget_bytes in (110, 110, 112, 110):
        portfolio.users_schedules(budget_bytes)
    assert solver.asked == [110, 112, 110]


def test_an_invalid_proposal_and_a_class_are_refused() -> None:
    with pytest.raises(SolverError, match="solver 'one' proposed an invalid schedule"):
        Portfolio(small_step(), [Counting("one", (0, 1))]).users_schedules(110)
    with pytest.raises(SolverError, match="Counting is a class"):
        Portfolio(small_step(), [Counting])  # type: ignore[list-item]
