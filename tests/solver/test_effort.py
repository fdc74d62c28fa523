import pytest

from examples.models.problems import chain, transformer, unet
from memopt.solver import Portfolio, Progress, Schedule, simulate
from tests.marks import slow


def half_way(problem):
    peak = simulate(problem, Schedule.save_all(problem)).peak_bytes
    smallest = Portfolio(problem).smallest().peak_bytes
    return (peak + 3 * smallest) // 4


@pytest.mark.parametrize("make", [lambda: transformer(2), *map(slow, (lambda: unet(3), lambda: chain(30)))])
def test_more_effort_is_never_slower(make) -> None:
    problem = make()
    budget_bytes = half_way(problem)
    fast = Portfolio(problem).solve(budget_bytes, "fast")
    default = Portfolio(problem).solve(budget_bytes)
    best = Portfolio(problem).solve(budget_bytes, "best", limit_seconds=1.0)
    assert max(fast.peak_bytes, default.peak_bytes, best.peak_bytes) <= budget_bytes
    assert best.added_seconds <= default.added_seconds + 1e-12
    assert default.added_seconds <= fast.added_seconds + 1e-12
    for solution in (fast, default, best):
        assert simulate(problem, solution.schedule).added_seconds == solution.added_seconds


def test_best_reports_its_progress_and_keeps_to_its_time() -> None:
    problem = unet(6, size=128)
    reports: list[Progress] = []
    solution = Portfolio(problem).solve(half_way(problem), "best", limit_seconds=1.0, report=reports.append)
    assert len(reports) >= 2
    assert [r.seconds for r in reports] == sorted(r.seconds for r in reports)
    assert [r.added_seconds for r in reports] == sorted((r.added_seconds for r in reports), reverse=True)
    assert reports[-1].added_seconds == pytest.approx(solution.added_seconds)
    assert all(r.lower_bound_seconds == solution.lower_bound_seconds for r in reports)


@pytest.mark.slow
def test_best_solves_a_small_problem_to_the_optimum() -> None:
    problem = chain(12)
    assert Portfolio(problem).solve(70, "best").method in ("exact", Portfolio(problem).solve(70).method)


def test_fast_finds_a_plan_wherever_default_does() -> None:
    problem = chain(40)
    smallest = Portfolio(problem).smallest().peak_bytes
    assert Portfolio(problem).solve(smallest, "fast").peak_bytes <= smallest


def test_refuses_another_effort() -> None:
    with pytest.raises(ValueError, match="not 'most'"):
        Portfolio(chain(3)).solve(1000, "most")  # type: ignore[arg-type]
