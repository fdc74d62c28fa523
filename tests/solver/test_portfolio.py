import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, transformer, unet
from memopt.solver import Infeasible, Portfolio, Schedule, floor_bytes, simulate
from memopt.solver.problem import RematProblem
from tests.marks import slow
from tests.solver.reference import optimum


def assert_as_promised(problem: RematProblem, portfolio: Portfolio, budget_bytes: int) -> float:
    """Solve and check all that does not need a second budget; the added seconds."""
    solution = portfolio.solve(budget_bytes)
    simulation = simulate(problem, solution.schedule)
    assert simulation.peak_bytes == solution.peak_bytes <= budget_bytes
    assert simulation.added_seconds == solution.added_seconds
    assert solution.lower_bound_seconds <= solution.added_seconds + 1e-9
    for baseline in portfolio.baselines():
        assert baseline.peak_bytes > budget_bytes or solution.added_seconds <= baseline.added_seconds + 1e-9
    return solution.added_seconds


@settings(max_examples=6)
@given(st.integers(0, 10**6))
def test_promises_on_random_graphs(number: int) -> None:
    check_promises(number)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_promises_on_many_random_graphs(number: int) -> None:
    check_promises(number)


def check_promises(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 14))
    portfolio = Portfolio(problem)
    smallest = portfolio.smallest()
    assert floor_bytes(problem) <= smallest.peak_bytes
    peak = simulate(problem, Schedule.save_all(problem)).peak_bytes
    budgets = sorted({smallest.peak_bytes, peak, *(state.randint(smallest.peak_bytes, peak) for _ in range(2))})
    added = [assert_as_promised(problem, portfolio, budget) for budget in budgets]
    assert added == sorted(added, reverse=True)
    assert added[-1] == 0.0
    with pytest.raises(Infeasible) as refusal:
        portfolio.solve(
            smallest.peak_bytes - 1 if smallest.peak_bytes == floor_bytes(problem) else floor_bytes(problem) - 1
        )
    assert refusal.value.smallest_peak_bytes == smallest.peak_bytes
    assert refusal.value.floor_bytes == floor_bytes(problem)


@pytest.mark.parametrize("problem", [transformer(4), slow(unet(3))])
def test_the_smallest_schedule_is_the_same_whatever_was_solved_before(problem: RematProblem) -> None:
    """A refusal names it to another process, which asks for that very budget first."""
    fresh, used = Portfolio(problem), Portfolio(problem)
    least, peak = fresh.smallest(), simulate(problem, Schedule.save_all(problem)).peak_bytes
    for share in (0.6, 0.3, 0.1, 0.02):
        used.solve(int(least.peak_bytes + share * (peak - least.peak_bytes)))
    assert used.smallest().schedule == least.schedule


@pytest.mark.parametrize("problem", [transformer(4), slow(unet(3))])
def test_a_schedule_is_the_same_whether_or_not_the_smallest_was_asked_for(problem: RematProblem) -> None:
    """The smallest is kept longer than the solvers: a plan must not depend on whether it was known before."""
    fresh, used = Portfolio(problem), Portfolio(problem)
    budget_bytes = int(1.02 * Portfolio(problem).smallest().peak_bytes)
    used.smallest()
    assert used.solve(budget_bytes).schedule == fresh.solve(budget_bytes).schedule


@pytest.mark.parametrize("numbers", [range(20), slow(range(20, 60))], ids=str)
def test_most_tiny_graphs_are_solved_to_the_optimum(numbers: range) -> None:
    solved, equal = 0, 0
    for number in numbers:
        state = random.Random(number)
        problem = random_problem(state, state.randint(2, 4))
        peak = simulate(problem, Schedule.save_all(problem)).peak_bytes
        portfolio = Portfolio(problem)
        smallest = portfolio.smallest().peak_bytes
        budget_bytes = state.randint(smallest, peak)
        try:
            least = optimum(problem, budget_bytes, most_states=8_000)
        except OverflowError:
            continue
        assert least is not None
        added = portfolio.solve(budget_bytes).added_seconds
        assert added >= least - 1e-9
        solved += 1
        equal += added <= least + 1e-9
    assert solved >= 2 / 3 * len(numbers)
    assert equal >= 0.95 * solved


@pytest.mark.parametrize("numbers", [range(15), slow(range(15, 40))], ids=str)
def test_most_tiny_graphs_reach_their_smallest_peak(numbers: range) -> None:
    solved, equal = 0, 0
    for number in numbers:
        problem = random_problem(random.Random(number), 3)
        smallest = Portfolio(problem).smallest().peak_bytes
        try:
            reachable = optimum(problem, smallest - 1, most_states=8_000)
        except OverflowError:
            continue
        solved += 1
        equal += reachable is None
    assert solved >= 0.6 * len(numbers)
    assert equal >= 0.9 * solved


@pytest.mark.parametrize("share", [slow(0.8), 0.5, slow(0.3), 0.22])
def test_promises_on_a_transformer(share: float) -> None:
    problem = transformer(12)
    budget_bytes = int(simulate(problem, Schedule.save_all(problem)).peak_bytes * share)
    assert_as_promised(problem, Portfolio(problem), budget_bytes)


def test_long_skips_are_no_obstacle() -> None:
    problem = unet()
    portfolio = Portfolio(problem)
    assert portfolio.smallest().peak_bytes < 1.1 * floor_bytes(problem)
    for share in (0.6, 0.7, 0.8):
        assert_as_promised(problem, portfolio, int(simulate(problem, Schedule.save_all(problem)).peak_bytes * share))


def test_a_chain_reaches_its_floor_by_recomputing_in_levels() -> None:
    problem = chain(24)
    smallest = Portfolio(problem).smallest()
    assert smallest.peak_bytes <= 1.05 * floor_bytes(problem)
    assert max(smallest.schedule.recomputed().values()) >= 3


@pytest.mark.parametrize("layers", [12, slow(24)])
def test_a_transformer_comes_near_its_floor(layers: int) -> None:
    problem = transformer(layers)
    assert Portfolio(problem).smallest().peak_bytes <= 1.05 * floor_bytes(problem)


def test_a_larger_budget_is_never_slower_whatever_was_asked_first() -> None:
    problem = transformer(2)
    portfolio = Portfolio(problem)
    peak = simulate(problem, Schedule.save_all(problem)).peak_bytes
    added = {share: portfolio.solve(int(peak * share)).added_seconds for share in (0.5, 0.8, 0.6, 0.9, 0.7, 0.55)}
    small_first = [0.5, 0.55, 0.7, 0.9]
    assert [added[share] for share in small_first] == sorted((added[share] for share in small_first), reverse=True)


def test_the_same_problem_gives_the_same_plan() -> None:
    problem = transformer(2)
    budget_bytes = int(simulate(problem, Schedule.save_all(problem)).peak_bytes * 0.6)
    assert Portfolio(problem).solve(budget_bytes) == Portfolio(problem).solve(budget_bytes)


def test_a_step_without_ops() -> None:
    solution = Portfolio(RematProblem((), (), 0, resident_bytes=5)).solve(5)
    assert solution.schedule == Schedule(())
    assert solution.peak_bytes == 5


def test_where_nothing_can_be_recomputed_everything_is_saved() -> None:
    problem = chain(6)
    problem = replace(problem, ops=tuple(replace(op, recomputable=False) for op in problem.ops))
    saved = simulate(problem, Schedule.save_all(problem))
    portfolio = Portfolio(problem)
    solution = portfolio.solve(saved.peak_bytes)
    assert (solution.schedule, solution.added_seconds) == (Schedule.save_all(problem), 0.0)
    assert (solution.method, solution.lower_bound_seconds) == ("save all", 0.0)
    assert portfolio.smallest() == solution
    assert [baseline.name for baseline in portfolio.baselines()] == ["save all"]
    with pytest.raises(Infeasible) as error:
        portfolio.solve(saved.peak_bytes - 1)
    assert error.value.smallest_peak_bytes == error.value.floor_bytes == saved.peak_bytes
    assert error.value.dominating_op == saved.peak_position
