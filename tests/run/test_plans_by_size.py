"""The choice among the plans of one region for different sizes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from memopt.errors import BudgetError
from memopt.run.sizes import PlansBySize


def emitted(added_seconds: float, step_seconds: float = 1.0) -> Any:
    return SimpleNamespace(plan=SimpleNamespace(added_seconds=added_seconds, added_time=added_seconds / step_seconds))


def plans_of(planning_seconds: float, **added: float) -> PlansBySize:
    """Plans for sizes such as "s100", with their added seconds."""
    plans = PlansBySize()
    for name, seconds in added.items():
        plans.add((int(name[1:]),), emitted(seconds), planning_seconds)
    return plans


def test_sizes_above_all_ceilings_have_no_plan() -> None:
    assert plans_of(1.0, s100=0.2).covering((101,)) is None


def test_the_plan_with_the_least_added_time_serves_a_call() -> None:
    plans = plans_of(math.inf, s100=0.2, s50=0.0, s75=0.1)
    assert [plans.covering((size,)) for size in (20, 60, 80)] == [(50,), (75,), (100,)]


def test_a_smaller_ceiling_is_planned_once_its_calls_have_lost_what_planning_takes() -> None:
    plans = plans_of(0.5, s100=0.2)
    found = [plans.covering((50,)) for _ in range(7)]  # each loses half of 0.2 seconds
    assert found == [(100,)] * 5 + [(50,)] * 2


def test_no_smaller_ceiling_where_it_would_save_nothing() -> None:
    plans = plans_of(0.0, s1000=0.01)
    assert {plans.covering((10,)) for _ in range(20)} == {(1000,)}


def test_smaller_ceilings_are_fractions_of_the_largest_and_not_of_each_other() -> None:
    plans = plans_of(0.0, s100=0.2, s75=0.1)
    asked = {plans.covering((size,)) for size in range(1, 101) for _ in range(2)}
    assert asked == {(50,), (75,), (100,)}


def test_no_smaller_ceiling_is_planned_beside_four_plans() -> None:
    plans = plans_of(0.0, s100=0.4, s110=0.4, s120=0.4, s130=0.4)
    assert plans.covering((10,)) in {(100,), (110,), (120,), (130,)}


def test_a_ceiling_that_no_plan_fits_is_not_tried_again() -> None:
    plans = plans_of(0.0, s100=0.2)
    plans.refuse((50,), refused := BudgetError(100, 200, "activations"))
    assert plans.refusal((50,)) is refused
    assert plans.covering((50,)) == (100,)
