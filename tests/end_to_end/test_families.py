"""Real architectures under budgets: the plain model's bits, peaks that were predicted, never above the budget."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import memopt
from examples.models.families import FAMILIES, Family
from examples.models.step import Step, restored_buffers, train_step
from memopt.errors import GIB
from tests.end_to_end.steps import assert_equal

pytestmark = pytest.mark.plans_always  # a first step that may fit counts the plain one, of some models on values
SHARES = (1.0, 0.75, 0.5, 0.25, 0.03, 0.01, 0.0)
"""Budgets between the smallest that works (0) and the plain model's peak (1)."""
USUAL = (0.4, 0.0)
DEEP = 0.03
"""At this share and below, some operator has three evaluations or more."""
ROUNDING = 1e-6
BITWISE = {"recompute", "reinplace"}


def check_budget(family: Family, plain: Step, model, batch, plan: memopt.Plan, budget_gb: float) -> memopt.Plan:
    with restored_buffers(model):
        memopt.optimize(model, budget_gb, optimizer=None, precision="fp32", allow=BITWISE)
        step = train_step(model, batch)
        made = memopt.plan_of(model)
        memopt.remove(model)
    assert_equal(step, plain, ROUNDING if family.rounding else 0.0)
    assert step.peak_bytes <= budget_gb * GIB
    assert step.peak_bytes <= made.predicted_peak_bytes <= 1.02 * step.peak_bytes
    captured = [[region.fingerprint for region in found.regions] for found in (made, plan)]
    assert captured[0] == captured[1], "fakes capture another graph than the model's own tensors"
    assert made.bound <= made.added_time + 1e-9
    return made


def budgets(plan: memopt.Plan, plain: Step, shares: tuple[float, ...]) -> list[float]:
    smallest = plan.smallest_gb()
    return [smallest + share * (plain.peak_bytes / GIB - smallest) for share in shares]


def run_family(family: Family, shares: tuple[float, ...]) -> None:
    model, batch = family.make(), family.batch("usual")
    with restored_buffers(model):
        plain = train_step(model, batch)
    plan = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow=BITWISE)
    for share, budget_gb in zip(shares, budgets(plan, plain, shares), strict=True):
        made = check_budget(family, plain, model, batch, plan, budget_gb)
        if share <= DEEP:
            assert made.schedule is not None
            assert max(made.schedule.recomputed().values()) >= 2
    with pytest.raises(memopt.BudgetError):
        plan.at(0.98 * plan.smallest_gb())


def tried(*quick: str, families: Iterable[Family] = FAMILIES) -> pytest.MarkDecorator:
    """A parameter `family`: every run tries the `quick` ones, `make test-all` all."""
    cases = [family if family.name in quick else pytest.param(family, marks=pytest.mark.slow) for family in families]
    return pytest.mark.parametrize("family", cases, ids=str)


@tried("unet")
def test_two_budgets(family: Family) -> None:
    run_family(family, USUAL)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_seven_budgets(family: Family) -> None:
    run_family(family, SHARES)


@pytest.mark.slow
@tried("gpt2-sdpa", families=[family for family in FAMILIES if family.repeated_blocks])
def test_beats_checkpointing_per_block(family: Family) -> None:
    model, batch = family.make(), family.batch("usual")
    plan = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow={"recompute"})
    family.per_block_checkpoint(model)  # type: ignore[misc]
    peak_gb = train_step(model, batch).peak_bytes / GIB
    assert plan.smallest_gb() < peak_gb
    per_block = next(recipe for recipe in plan.recipes() if recipe.name == "per block")
    assert plan.at(peak_gb).added_time < per_block.added_time
