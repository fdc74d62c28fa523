import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, transformer, unet
from memopt.solver import Infeasible, Portfolio, Schedule, floor_bytes, simulate
from memopt.solver.arrays import arrays_of, to_array
from memopt.solver.lower_bound import floor_of
from memopt.solver.offload import OffloadPortfolio, OffloadSolution
from memopt.solver.offload_search import OffloadSearch
from memopt.solver.problem import Link, RematProblem
from tests.marks import slow
from tests.solver.offloading import least_of_all, least_stalls, stays_of_all


def assert_as_promised(
    problem: RematProblem, portfolio: OffloadPortfolio, budget_bytes: int, link: Link
) -> OffloadSolution:
    """Solve quickly and check what does not need a second budget."""
    solution = portfolio.solve(budget_bytes, link, "fast")
    simulation = simulate(problem, solution.schedule, link)
    assert simulation.peak_bytes == solution.peak_bytes <= budget_bytes
    assert simulation.added_seconds == solution.added_seconds >= solution.stall_seconds
    assert simulation.host_bytes == solution.host_bytes <= (math.inf if link.host_bytes is None else link.host_bytes)
    assert solution.lower_bound_seconds <= solution.added_seconds + 1e-9
    return solution


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_promises_on_random_graphs(number: int) -> None:
    check_promises(number)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_promises_on_many_random_graphs(number: int) -> None:
    check_promises(number)


def check_promises(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    plain = Portfolio(problem)
    portfolio = OffloadPortfolio(problem, plain)
    link = Link(state.choice([0.5, 5.0, 50.0]), state.choice([0.0, 0.1]))
    peak, floor = simulate(problem, Schedule.save_all(problem)).peak_bytes, floor_of(problem, offloading=True)[0]
    assert portfolio.smallest(link).peak_bytes <= floor
    smallest = plain.smallest().peak_bytes
    added = []
    for budget_bytes in sorted({floor, smallest, peak, state.randint(floor, peak)}):
        added.append(assert_as_promised(problem, portfolio, budget_bytes, link).added_seconds)
        if budget_bytes >= smallest:
            assert added[-1] <= plain.solve(budget_bytes, "fast").added_seconds
    assert added == sorted(added, reverse=True)
    assert assert_as_promised(problem, portfolio, floor, Link(math.inf)).added_seconds == 0.0
    with pytest.raises(Infeasible) as refusal:
        portfolio.solve(floor - 1, link)
    assert (refusal.value.smallest_peak_bytes, refusal.value.floor_bytes) == (floor, floor)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_a_small_host_is_never_overfilled(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(3, 12))
    portfolio = OffloadPortfolio(problem)
    link = Link(10.0, 0.0, host_bytes=state.randint(0, 60))
    smallest = portfolio.smallest(link)
    assert floor_of(problem, offloading=True)[0] <= smallest.peak_bytes <= portfolio.smallest(Link(0.0)).peak_bytes
    assert_as_promised(problem, portfolio, smallest.peak_bytes, link)
    assert_as_promised(problem, portfolio, smallest.peak_bytes + 5, link)


@pytest.mark.parametrize("problem", [transformer(2), unet(2), chain(12)], ids=["transformer", "hourglass", "chain"])
def test_without_bandwidth_all_is_as_without_offload(problem: RematProblem) -> None:
    plain = Portfolio(problem)
    budget_bytes = (plain.smallest().peak_bytes + simulate(problem, Schedule.save_all(problem)).peak_bytes) // 2
    solution = OffloadPortfolio(problem).solve(budget_bytes, Link(0.0))
    without = Portfolio(problem).solve(budget_bytes)
    assert (solution.schedule, solution.added_seconds) == (without.schedule, without.added_seconds)
    assert solution.schedule.offloads == ()
    with pytest.raises(Infeasible) as refusal:
        OffloadPortfolio(problem, plain).solve(plain.smallest().peak_bytes - 1, Link(0.0))
    assert refusal.value.floor_bytes == floor_bytes(problem)


def test_a_fast_link_costs_nothing_down_to_what_one_op_needs() -> None:
    problem = transformer(3)
    floor = floor_of(problem, offloading=True)[0]
    assert floor < floor_bytes(problem)
    solution = OffloadPortfolio(problem).solve(floor, Link(math.inf))
    assert (solution.added_seconds, solution.lower_bound_seconds) == (0.0, 0.0)
    assert solution.schedule.recomputed() == {}


@pytest.mark.parametrize("share", [0.4, slow(0.05)])
def test_a_transformer_gains_what_the_link_can_move(share: float) -> None:
    """The bounds with and without the link say what it is worth at most."""
    problem = transformer(6, width=1600)
    plain = Portfolio(problem)
    smallest, most = plain.smallest().peak_bytes, simulate(problem, Schedule.save_all(problem)).peak_bytes
    budget_bytes = int(smallest + share * (most - smallest))
    link = Link(50e9, 1e-5)
    solution = OffloadPortfolio(problem, plain).solve(budget_bytes, link)
    without = plain.solve(budget_bytes)
    gained = without.added_seconds - solution.added_seconds
    possible = without.lower_bound_seconds - solution.lower_bound_seconds
    assert gained >= 0.7 * possible > 0
    assert solution.host_bytes <= 50e9 * problem.seconds / 2


def test_a_faster_link_is_never_slower_whatever_budget_was_asked_first() -> None:
    problem = transformer(4)
    portfolio = OffloadPortfolio(problem)
    smallest, most = portfolio.smallest(Link(0.0)).peak_bytes, simulate(problem, Schedule.save_all(problem)).peak_bytes
    budgets = [int(smallest + share * (most - smallest)) for share in (0.4, 0.1)]
    links = [Link(0.0), *(Link(speed, 1e-5) for speed in (1e10, 3e10, 1e11, 1e12, 1e13))]
    added = [[portfolio.solve(budget, link, "fast").added_seconds for budget in budgets] for link in links]
    for slower, faster in itertools.pairwise(added):
        assert all(f <= s for s, f in zip(slower, faster, strict=True))
    assert all(larger <= smaller for larger, smaller in added)
    assert added[-1] < added[0]


def test_most_placements_wait_no_longer_than_the_best_of_all() -> None:
    """On one order of evaluations, against all choices of offloads and positions."""
    tried = equal = 0
    for number in range(60):
        state = random.Random(number)
        problem = random_problem(state, state.randint(2, 4))
        schedule = Schedule.save_all(problem)
        peak, floor = simulate(problem, schedule).peak_bytes, floor_of(problem, offloading=True)[0]
        if floor >= peak or stays_of_all(problem, schedule) > 5_000:
            continue
        budget_bytes, link = state.randint(floor, peak - 1), Link(state.choice([2.0, 5.0, 10.0, 30.0]))
        least = least_stalls(problem, schedule, budget_bytes, link)
        search = OffloadSearch(arrays_of(problem), budget_bytes, link)
        search.consider("placed", to_array(schedule))
        assert least is not None
        assert search.best is not None
        assert search.best.added_seconds >= least - 1e-9
        tried += 1
        equal += search.best.added_seconds <= least + 1e-9
    assert tried >= 10
    assert equal >= 0.85 * tried


@pytest.mark.slow
def test_most_tiny_graphs_are_solved_as_well_as_by_trying_everything() -> None:
    """All saved sets, recomputed just in time, with all offloads at all positions; plans may be better than these."""
    tried = equal = 0
    for number in range(90):
        state = random.Random(number)
        problem = random_problem(state, state.randint(2, 4))
        peak, floor = simulate(problem, Schedule.save_all(problem)).peak_bytes, floor_of(problem, offloading=True)[0]
        if floor >= peak or stays_of_all(problem, Schedule.save_all(problem)) > 400:
            continue
        budget_bytes, link = state.randint(floor, peak - 1), Link(state.choice([2.0, 5.0, 10.0, 30.0]))
        least = least_of_all(problem, budget_bytes, link)
        solution = OffloadPortfolio(problem).solve(budget_bytes, link)
        assert solution.lower_bound_seconds <= least + 1e-9
        tried += 1
        equal += solution.added_seconds <= least + 1e-9
    assert tried >= 8
    assert equal >= 0.9 * tried


def test_refuses_an_unknown_effort() -> None:
    with pytest.raises(ValueError, match="not 'most'"):
        OffloadPortfolio(chain(4)).solve(100, Link(1.0), "most")  # type: ignore[arg-type]


def test_the_same_problem_gives_the_same_plan() -> None:
    problem = transformer(2)
    budget_bytes = int(simulate(problem, Schedule.save_all(problem)).peak_bytes * 0.7)
    link = Link(25e9, 1e-5, 10**9)
    assert OffloadPortfolio(problem).solve(budget_bytes, link) == OffloadPortfolio(problem).solve(budget_bytes, link)
