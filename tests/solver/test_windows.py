import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, text, transformer
from memopt.solver import Portfolio, Schedule, floor_bytes, simulate
from memopt.solver.arrays import arrays_of, peak_bytes, to_array, to_schedule
from memopt.solver.exact import random_window, solved, window
from memopt.solver.repair import repair


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 0.6))
def test_what_it_finds_fits_and_adds_less(number: int, share: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(6, 20))
    arrays = arrays_of(problem)
    floor, peak = floor_bytes(problem), simulate(problem, Schedule.save_all(problem)).peak_bytes
    cap_bytes = int(floor + share * (peak - floor))
    evaluations = repair(arrays, to_array(Schedule.save_all(problem)), cap_bytes).evaluations
    if evaluations is None:
        return
    draw = np.random.default_rng(number)
    for _ in range(4):
        stretch = random_window(problem, arrays, evaluations, int(draw.integers(1, 8)), draw)
        better = None if stretch is None else solved(evaluations, stretch, cap_bytes, 2.0)
        if better is not None:
            simulation = simulate(problem, to_schedule(better))
            assert simulation.peak_bytes <= cap_bytes
            assert simulation.added_seconds < to_schedule(evaluations).added_seconds(problem)


def test_a_stretch_that_recomputes_too_much() -> None:
    problem = chain(6)
    arrays = arrays_of(problem)
    wasteful = to_array(Schedule((0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 8, 1, 2, 9, 1, 10, 11)))
    simulate(problem, to_schedule(wasteful))
    stretch = window(problem, arrays, wasteful, 7, 15)
    assert stretch is not None
    assert stretch.again_seconds == pytest.approx(5.0)
    better = solved(wasteful, stretch, peak_bytes(arrays, wasteful), 5.0)
    assert better is not None
    assert text(problem, to_schedule(better)) == (
        "0 1 2 3 4 5 loss.grad (1) 5.grad (2) (3) 4.grad (0) 3.grad (1) 2.grad 1.grad"
    )


def test_leaves_alone_what_is_best_already() -> None:
    problem = transformer(2)
    arrays = arrays_of(problem)
    save_all = to_array(Schedule.save_all(problem))
    stretch = random_window(problem, arrays, save_all, 8, np.random.default_rng(0))
    assert stretch is not None
    assert solved(save_all, stretch, peak_bytes(arrays, save_all), 5.0) is None


def test_best_effort_is_no_worse_with_windows() -> None:
    problem = transformer(3)
    smallest = Portfolio(problem).smallest().peak_bytes
    default = Portfolio(problem).solve(int(1.03 * smallest))
    best = Portfolio(problem).solve(int(1.03 * smallest), "best", limit_seconds=3.0)
    assert best.peak_bytes <= int(1.03 * smallest)
    assert best.added_seconds <= default.added_seconds
