import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.exact import solve_exactly
from examples.models.problems import chain, random_problem, transformer, unet
from memopt.solver import Infeasible, Portfolio, Schedule, floor_bytes, simulate
from memopt.solver.problem import RematProblem
from tests.solver.reference import optimum, revolve


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_is_the_optimum_of_tiny_graphs(number: int, share: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 4))
    floor, peak = floor_bytes(problem), simulate(problem, Schedule.save_all(problem)).peak_bytes
    budget_bytes = int(floor + share * (peak - floor))
    exact = solve_exactly(problem, budget_bytes, seconds=5)
    try:
        least = optimum(problem, budget_bytes, most_states=8_000)
    except OverflowError:
        return
    if exact.schedule is not None:
        assert simulate(problem, exact.schedule).peak_bytes <= budget_bytes
        assert simulate(problem, exact.schedule).added_seconds == exact.added_seconds
        assert least is not None
        assert exact.added_seconds >= least - 1e-9
        if exact.proven and len(problem.ops) < 9:
            assert exact.added_seconds <= least + 1e-3 * problem.seconds or least == 0.0


def test_says_what_no_schedule_can_do() -> None:
    problem = chain(6)
    exact = solve_exactly(problem, floor_bytes(problem) - 1)
    assert (exact.schedule, exact.proven) == (None, True)
    assert exact.bound_seconds == float("inf")


def test_a_chain_by_revolve() -> None:
    exact = solve_exactly(chain(12), 40)
    assert exact.proven
    assert exact.added_seconds == pytest.approx(revolve(12, 1) - 11)


def test_does_not_look_above_what_is_known() -> None:
    problem = chain(12)
    assert solve_exactly(problem, 70, below_seconds=0.5).schedule is None
    assert solve_exactly(problem, 70, below_seconds=100).schedule is not None


def test_the_mixed_integer_solver_works_beside_the_flow_solver_whichever_comes_first() -> None:
    problem = transformer(1)
    budget_bytes = int(0.9 * simulate(problem, Schedule.save_all(problem)).peak_bytes)
    first = solve_exactly(problem, budget_bytes)
    between = Portfolio(problem).solve(budget_bytes)
    assert solve_exactly(problem, budget_bytes) == first
    assert between.added_seconds == pytest.approx(first.added_seconds, abs=1e-3 * problem.seconds)


def graphs() -> Iterator[tuple[str, RematProblem]]:
    """Graphs of up to 170 ops, real shapes and random ones."""
    yield from ((f"chain of {length}", chain(length)) for length in (8, 12, 16, 24))
    yield "transformer of 1 layer", transformer(1)
    yield "transformer of 2 layers", transformer(2)
    yield "transformer of 2 short layers", transformer(2, length=128, width=256)
    yield "transformer of 3 narrow layers", transformer(3, length=512, width=256)
    yield "hourglass of 2 levels", unet(2)
    yield "hourglass of 3 levels", unet(3)
    yield from ((f"random {n}", random_problem(random.Random(n), 6 + n % 15)) for n in range(24))


class Tally:
    """How the portfolio's default compares with the reference."""

    def __init__(self) -> None:
        self.graphs: set[str] = set()
        self.proven = 0
        self.equal = 0
        self.worst_points = 0.0
        self.missed: list[str] = []

    def compare(self, name: str, problem: RematProblem, share: float, seconds: float) -> None:
        floor, peak = floor_bytes(problem), simulate(problem, Schedule.save_all(problem)).peak_bytes
        budget_bytes = int(floor + share * (peak - floor))
        portfolio = Portfolio(problem)
        try:
            added = portfolio.solve(budget_bytes).added_seconds
        except Infeasible:
            least_bytes = int(budget_bytes / 1.02)
            if solve_exactly(problem, least_bytes, seconds=seconds).schedule is not None:
                self.missed.append(f"{name} at {share}")
            return
        exact = solve_exactly(problem, budget_bytes, seconds=seconds)
        if not exact.proven or exact.schedule is None:
            return
        self.graphs.add(name)
        points = 100 * (added - exact.added_seconds) / problem.seconds
        self.proven += 1
        self.equal += points <= 0.1
        self.worst_points = max(self.worst_points, points)


@pytest.mark.slow
def test_the_portfolio_is_as_good_on_a_few_graphs() -> None:
    tally = Tally()
    for number, (name, problem) in enumerate(graphs()):
        if number % 3 == 0 and len(problem.ops) <= 60:
            tally.compare(name, problem, 0.4, seconds=3)
    assert tally.proven >= 5
    assert tally.equal >= 0.9 * tally.proven
    assert tally.worst_points <= 1.0
    assert not tally.missed


@pytest.mark.slow
def test_the_portfolio_is_as_good_on_many_graphs() -> None:
    tally = Tally()
    for name, problem in graphs():
        assert len(problem.ops) <= 170
        for share in (0.7, 0.4, 0.2, 0.08):
            tally.compare(name, problem, share, seconds=6)
    assert len(tally.graphs) >= 30
    assert tally.proven >= 60
    assert tally.equal >= 0.9 * tally.proven
    assert tally.worst_points <= 1.0
    assert not tally.missed


def test_a_program_above_the_size_asked_for_is_left_unsolved() -> None:
    problem = chain(12)
    assert solve_exactly(problem, 40, variables=10).schedule is None
    assert not solve_exactly(problem, 40, variables=10).proven


def test_the_gap_is_a_share_of_the_step_whatever_the_seconds() -> None:
    """A search that ends at the gap ends as early for a step of microseconds as for one of seconds."""
    problem = random_problem(random.Random(101), 13)
    faster = replace(problem, ops=tuple(replace(op, seconds=op.seconds * 1e-6) for op in problem.ops))
    gaps = [solve_exactly(one, 257, gap_seconds=0.3 * one.seconds) for one in (problem, faster)]
    assert gaps[0].schedule == gaps[1].schedule
    assert gaps[0].bound_seconds * 1e-6 == pytest.approx(gaps[1].bound_seconds)
    assert gaps[0].bound_seconds < gaps[0].added_seconds
