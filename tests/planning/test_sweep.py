"""Every curve is within its budgets, above its bound, and never slower for more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from memopt.errors import GIB
from memopt.planning import figures as pareto_sweep
from memopt.planning.figures import budgets_between
from memopt.planning.frontier import Frontier
from memopt.planning.options import Effort
from memopt.planning.priced_step import PricedStep
from tests.marks import slow
from tests.planned import ACCOUNT, captured, make_plan, region, two_regions
from tests.planning.curves import roomy, solved

ROUNDING = 1e-9


def frontier(step: PricedStep, **changes: object) -> Frontier:
    return make_plan(step, replace(ACCOUNT, **changes), 10**7).frontier(9)


CURVES = {
    "one region": solved,
    "two regions": lambda: frontier(two_regions()),
    "gradients held": lambda: frontier(captured(region(6)), gradients_held=True),
    "a large optimiser step": lambda: frontier(captured(region(6)), optimizer_temporaries=20_000),
}


@pytest.fixture(
    scope="module", params=["one region", "two regions", slow("gradients held"), slow("a large optimiser step")]
)
def curve(request: pytest.FixtureRequest) -> Frontier:
    return CURVES[request.param]()


def test_both_ends_are_there(curve: Frontier) -> None:
    first, last = curve.points[0], curve.points[-1]
    assert first.budget_gb == curve.smallest_gb == first.peak_gb >= curve.floor_gb
    assert last.budget_gb == curve.plain_gb
    assert (last.added_time, last.evaluations) == (0.0, 1)
    assert first.added_time > 0


def test_monotone(curve: Frontier) -> None:
    for less, more in pairwise(curve.points):
        assert less.budget_gb < more.budget_gb
        assert less.peak_gb <= more.peak_gb
        assert less.added_time >= more.added_time
        assert less.bound >= more.bound


def test_between_bound_and_budget(curve: Frontier) -> None:
    for point in curve.points:
        assert curve.smallest_gb <= point.peak_gb <= point.budget_gb
        assert 0 <= point.bound <= point.added_time + ROUNDING
        assert (point.evaluations > 1) == (point.added_time > 0)


def test_no_recipe_is_better(curve: Frontier) -> None:
    assert len(curve.recipes) > 2
    for recipe in curve.recipes:
        assert curve.at(recipe.peak_gb).added_time <= recipe.added_time


def test_plans_are_as_good_as_the_points_of_the_curve() -> None:
    for point in solved().points:
        plan = roomy().at(point.budget_gb)
        assert plan.added_time <= point.added_time
        assert plan.bound <= point.bound + ROUNDING
        assert plan.predicted_peak_gb <= point.budget_gb
        assert solved().plan(point.budget_gb).added_time <= point.added_time
    assert roomy().at(solved().plain_gb).predicted_peak_bytes == roomy().plain.peak_bytes


@pytest.mark.slow
def test_the_optimizer_step_is_the_least_peak() -> None:
    curve = CURVES["a large optimiser step"]()
    after = replace(ACCOUNT, optimizer_temporaries=20_000).optimizer_step_bytes(512)
    assert curve.smallest_gb * GIB == curve.floor_gb * GIB == after
    assert "optimizer temporaries" in curve.dominated_by


@pytest.mark.parametrize("points", [2, 3, 8, 9, 40])
def test_budgets(points: int) -> None:
    budgets = budgets_between(10**9, 9 * 10**9, points)
    assert len(budgets) == points
    assert budgets == sorted(set(budgets))
    assert (budgets[0], budgets[-1]) == (10**9, 9 * 10**9)
    largest = max(more - less for less, more in pairwise(budgets))
    assert largest <= 8 * 10**9 / (points - (points - 1) // 2 - 1) + 1
    if points > 8:
        assert budgets[points // 2] < 5 * 10**9, "denser towards the smallest"


def test_few_bytes_have_few_budgets() -> None:
    assert budgets_between(100, 100, 40) == [100]
    assert budgets_between(100, 103, 40) == [100, 101, 102, 103]


@pytest.mark.slow
def test_every_effort() -> None:
    step = captured(region(8))
    fast = make_plan(step, ACCOUNT, 10**7, Effort("fast")).frontier(5)
    best = make_plan(step, ACCOUNT, 10**7).frontier(5, effort="best", limit_seconds=0.5)
    assert (fast.effort, best.effort) == (Effort("fast"), Effort("best", 0.5))
    for worse, better in zip(fast.points, best.points, strict=True):
        assert worse.budget_gb == better.budget_gb
        assert better.added_time <= worse.added_time


def test_the_curve_has_the_notes_of_the_plan() -> None:
    noted = replace(roomy(), notes=("the loss is computed outside of the model",))
    assert noted.frontier(2).notes == noted.notes


def test_how_far_the_sweep_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    @contextmanager
    def stage(name: str) -> Iterator[Callable[[str], None]]:
        lines.append(name)
        yield lines.append

    monkeypatch.setattr(pareto_sweep, "stage", stage)
    curve = make_plan(captured(region(6)), ACCOUNT, 10**7).frontier(3, effort="best", limit_seconds=0.4)
    count = len(curve.points)
    assert f"solving for {count} budgets" in lines
    assert [line for line in lines if line.endswith(" done")] == [f"{number} done" for number in range(count)]
    assert any(line.startswith("0 done; added time ") for line in lines)
