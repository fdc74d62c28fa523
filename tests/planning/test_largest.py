"""The largest size that fits, searched for among plans of given figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.errors import BudgetError, CaptureError
from memopt.planning.largest import largest_size


@dataclass(frozen=True)
class Planned:
    """A plan with the figures that the search asks for."""

    least: int
    added_time: float = 0.0

    def smallest_bytes(self) -> int:
        return self.least


def planner(needs: Callable[[int], int], budget_bytes: int, tried: list[int]) -> Callable[[int], Planned]:
    def plan(size: int) -> Planned:
        tried.append(size)
        if needs(size) > budget_bytes:
            raise BudgetError(budget_bytes, needs(size), "activations")
        return Planned(needs(size))

    return plan


def search(needs: Callable[[int], int], budget_bytes: int, **options: Any) -> tuple[int, list[int]]:
    tried: list[int] = []
    found = largest_size(planner(needs, budget_bytes, tried), budget_bytes, **options)
    return found, tried


def test_a_line_takes_few_plans() -> None:
    found, tried = search(lambda size: 10_000 + 37 * size, 20_000)
    assert found == (20_000 - 10_000) // 37 == 270
    assert len(tried) <= 8


@given(
    st.integers(0, 10**6), st.integers(1, 5000), st.floats(0, 3), st.integers(1, 500), st.integers(1, 16),
)  # fmt: skip
def test_exact_for_any_growth(fixed: int, slope: int, power: float, size: int, step: int) -> None:
    def needs(size: int) -> int:
        return fixed + int(slope * size ** (0.5 + power)) + (size % 3) * (slope // 8 if size > 5 else 0)

    def grows(number: int) -> int:
        return max(needs(batch) for batch in range(max(1, number - 3), number + 1))

    wanted = size * step
    budget = grows(wanted)
    if grows(step) > budget:
        return
    found, tried = search(grows, budget, step=step)
    assert found % step == 0
    assert grows(found) <= budget < grows(found + step)
    assert len(tried) <= 60


def test_up_to_at_most() -> None:
    assert search(lambda size: size, 1000, at_most=100)[0] == 100
    assert search(lambda size: size, 1000, step=30, at_most=100)[0] == 90


def test_the_next_size_was_planned() -> None:
    found, tried = search(lambda size: 5 + size * size, 105)
    assert found == 10
    assert {10, 11} <= set(tried)


def test_not_even_one() -> None:
    with pytest.raises(BudgetError) as error:
        search(lambda size: 100 * size, 50)
    assert error.value.smallest_bytes == 100


def test_a_size_that_nothing_depends_on() -> None:
    with pytest.raises(ValueError, match=r"every size fits: .* give at_most="):
        search(lambda size: 100, 150)


def test_at_most_below_the_step() -> None:
    with pytest.raises(ValueError, match="at_most must be at least 8, the smallest size to try, not 5"):
        search(lambda size: size, 100, step=8, at_most=5)


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 1000))
def test_sizes_that_add_too_much_time_do_not_fit(quick: int, step: int, budget: int) -> None:
    """Sizes up to `quick` add nothing, larger ones half of the step."""

    def plan(size: int) -> Planned:
        if size > budget:
            raise BudgetError(budget, size, "activations")
        return Planned(size, 0.0 if size <= quick else 0.5)

    def find(added_time: float) -> int:
        return largest_size(plan, budget, step, added_time=added_time)

    if budget < step:
        return
    assert find(0.5) == budget // step * step
    if quick < step:
        with pytest.raises(ValueError, match=r"only with 50% of added time, more than max_added_time=0.3"):
            find(0.3)
    else:
        assert find(0.3) == min(budget, quick) // step * step


@given(st.integers(0, 10**5), st.integers(1, 500), st.integers(1, 3000), st.integers(-200, 200), st.integers(1, 8))
def test_estimates_change_no_result(fixed: int, slope: int, wanted: int, off: int, step: int) -> None:
    """They are off by a number of steps to either side."""

    def needs(size: int) -> int:
        return fixed + slope * (size // step)

    budget, tried = needs(wanted * step), []
    plan = planner(needs, budget, tried)
    assert largest_size(plan, budget, step, estimate=lambda size: needs(size) - slope * off) == wanted * step
    assert len(tried) <= (2 if not off else 40)


def test_nothing_far_above_the_largest_is_planned() -> None:
    """The estimates look for it, and grow at most eightfold."""
    tried: list[int] = []
    estimated: list[int] = []

    def needs(size: int) -> int:
        return max(1000, 7 * size)

    def estimate(size: int) -> int:
        estimated.append(size)
        return needs(size)

    assert largest_size(planner(needs, 3507, tried), 3507, estimate=estimate) == 501
    assert tried == [501, 502]
    assert max(estimated) <= 8 * 501
    assert len(estimated) <= 10


def test_where_needs_fall_as_the_size_grows_no_plan_is_made_far_above_the_largest() -> None:
    """Fragmentation adds different bytes at each size: the needs of neighbours say nothing about those far away."""
    tried: list[int] = []

    def plan(size: int) -> Planned:
        tried.append(size)
        if size > 56:
            raise BudgetError(4000, 4001, "activations")
        return Planned(3990 - size)

    assert largest_size(plan, 4000, estimate=lambda size: 87 * size) == 56
    assert tried[:3] == [45, 46, 47]
    assert max(tried) <= 2 * 56
    assert len(tried) <= 10


def test_a_size_that_cannot_be_captured_ends_the_estimates() -> None:
    tried: list[int] = []

    def estimate(size: int) -> int:
        raise CaptureError("longer than the model's table of positions")

    assert largest_size(planner(lambda size: size, 100, tried), 100, estimate=estimate) == 100
