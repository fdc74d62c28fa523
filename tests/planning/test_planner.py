"""Plans of captured regions, on graphs written by hand."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from examples.models.problems import random_schedule
from memopt.account.account import Account
from memopt.errors import GIB, BudgetError
from memopt.planning.joined import Joined
from memopt.planning.options import Effort
from memopt.planning.planner import Request, progress_line, recipes, smallest, solve
from memopt.planning.priced_step import PricedStep
from memopt.planning.schedule_parts import held_after_forward, module_rows, split
from memopt.price.price import split_halves
from memopt.solver import Progress, Schedule, simulate
from tests.marks import slow
from tests.planned import ACCOUNT, captured, make_plan, region, two_regions

HELD = replace(ACCOUNT, gradients_held=True)
ROOMY = 10**6


def joined(step: PricedStep) -> Joined:
    return step.problem


def least_budget(step: PricedStep, account: Account) -> int:
    return smallest(step.under(account).problem, account)[0]


def test_regions_go_forward_in_order_and_backward_in_reverse() -> None:
    both = joined(two_regions())
    ops = zip(both.owner, both.problem.ops, strict=True)
    runs = itertools.groupby(ops, key=lambda pair: pair[0][0])
    assert_expected_inline(
        "\n".join(f"{number}: {' '.join(op.name.split(' of ')[0] for _, op in run)}" for number, run in runs),
        """\
0: mm gelu mm_1 gelu_1
1: mm gelu mm_1 gelu_1 sum_1 tangents_1 gelu_backward mm_2 mm_3 gelu_backward_1 mm_4 mm_5 hand_over_gradients
0: tangents_1 gelu_backward mm_2 mm_3 gelu_backward_1 mm_4 mm_5 hand_over_gradients""",
    )
    assert both.problem.forward_ops == 10
    for (number, local), op in zip(both.owner, both.problem.ops, strict=True):
        own = both.prices[number].problem
        for ours, theirs in ((op.reads, own.ops[local].reads), (op.makes, own.ops[local].makes)):
            assert [both.problem.storages[s] for s in ours] == [own.storages[s] for s in theirs]


def test_values_that_the_next_region_reads_are_kept() -> None:
    problem = joined(two_regions()).problem
    kept = [storage.name for storage in problem.storages if storage.kept]
    assert kept == ["gelu_1", "tangents_1", "mm_2", "mm_4", "mm_5", "sum_1", "tangents_1", "mm_2", "mm_4", "mm_5"]


def test_a_schedule_splits_into_those_of_the_regions() -> None:
    step = two_regions()
    both = joined(step)
    for part, joint in zip(split(both, step.traced, Schedule.save_all(both.problem)), step.traced.regions, strict=True):
        forward, backward = ([node.name for node in half] for half in split_halves(joint.module.graph))
        assert part.evaluations == (*forward, *backward)
        assert part.boundary == len(forward)
        assert part.fingerprint == joint.fingerprint


def test_recomputed_operators_go_to_their_region() -> None:
    step = two_regions()
    both = joined(step)
    for seed in range(5):
        schedule = random_schedule(random.Random(seed), both.problem)
        parts = split(both, step.traced, schedule)
        owners = [both.owner[op] for op in schedule.evaluations]
        named = [(region, both.prices[region].nodes[local]) for region, local in owners]
        for number, part in enumerate(parts):
            assert part.evaluations == tuple(node for owner, node in named if owner == number and node)
            forward = split_halves(step.traced.regions[number].module.graph)[0]
            first = max(part.evaluations.index(node.name) for node in forward)
            assert part.boundary == first + 1, "later recomputation belongs to the backward"


@pytest.mark.parametrize("step", [captured(region(6)), two_regions()], ids=["one region", "two regions"])
@pytest.mark.parametrize("account", [ACCOUNT, slow(HELD), replace(ACCOUNT, optimizer_temporaries=0, gradients=0)])
def test_budgets(step: PricedStep, account: Account) -> None:
    """Plans keep the budget, are not below the bound, are not slower with more memory, and agree with the simulator."""
    plain = make_plan(step, account, ROOMY)
    assert plain.added_seconds == 0
    least = least_budget(step, account)
    last = float("inf")
    for share in (0, 0.1, 0.3, 0.5, 0.8, 1):
        budget = least + int(share * (plain.predicted_peak_bytes - least))
        plan = make_plan(step, account, budget)
        assert plan.predicted_peak_bytes <= budget
        assert plan.bound_seconds <= plan.added_seconds + 1e-12
        assert plan.added_seconds <= last
        last = plan.added_seconds
        problem = replace(plan.joined.problem, resident_bytes=account.resident_bytes)
        assert simulate(problem, plan.schedule).peak_bytes <= plan.predicted_peak_bytes
        assert plan.plain == plain.plain
    assert plan.added_seconds == 0, "nothing is recomputed at the plain step's own peak"


@pytest.mark.slow
def test_the_best_effort_reports_its_progress() -> None:
    both = joined(captured(region(8)))
    budget = smallest(both, ACCOUNT)[0]
    lines: list[str] = []
    best = solve(both, Request(ACCOUNT, budget, Effort("best", 0.3), lines.append))
    assert lines
    assert all(re.fullmatch(r"added time [\d.]+%, no plan adds less than [\d.]+%; \d+ of 0 s", line) for line in lines)
    lines.clear()
    found = solve(joined(captured(region(8))), Request(ACCOUNT, budget, tell=lines.append))
    assert found.added_seconds >= best.added_seconds
    assert not lines


def test_progress_line() -> None:
    line = progress_line(Progress(12.4, 0.0251, 0.02), step_seconds=0.1, limit_seconds=60.0)
    assert line == "added time 25.10%, no plan adds less than 20.00%; 12 of 60 s"
    assert progress_line(Progress(1.0, 0.0, 0.0), 0.0, 60.0).startswith("added time 0.00%")


@pytest.mark.parametrize("account", [ACCOUNT, HELD, replace(ACCOUNT, optimizer_temporaries=10**5)])
def test_the_smallest_budget_of_a_refusal_works(account: Account) -> None:
    step = captured(region(4))
    least = least_budget(step, account)
    with pytest.raises(BudgetError) as refusal:
        make_plan(step, account, least - 1)
    assert refusal.value.budget_gb == (least - 1) / GIB
    assert refusal.value.smallest_gb == least / GIB
    printed = re.search(r"the smallest that works is (\S+) GB", str(refusal.value))
    assert printed is not None
    for gb in (refusal.value.smallest_gb, float(printed[1])):
        assert make_plan(step, account, int(gb * GIB)).predicted_peak_bytes <= gb * GIB
    assert float(printed[1]) < 1.0001 * least / GIB


def test_a_refusal_says_what_dominates() -> None:
    step = captured(region(4))
    with pytest.raises(BudgetError, match=r"by optimizer temporaries 95\.4 MB, .* \(at optimizer\.step\(\)\)"):
        make_plan(step, replace(ACCOUNT, optimizer_temporaries=10**8), 10**7)
    with pytest.raises(BudgetError, match=r"dominated by parameters 954 MB, .* \(at \w+\)"):
        make_plan(step, replace(ACCOUNT, parameters=10**9), 10**7)


def test_held_gradients_are_accumulated_at_once() -> None:
    step = captured(region(6))
    first, later = make_plan(step, ACCOUNT, ROOMY), make_plan(step, HELD, ROOMY)
    weights = 6 * 16 * 16 * 4
    assert simulate(first.joined.problem, first.schedule).live_bytes[-1] == weights + 2 * 512
    assert simulate(later.joined.problem, later.schedule).live_bytes[-1] == 2 * 512
    assert dict(later.plain.rows)["gradients"] == HELD.gradients
    assert not any(storage.kept and storage.name.startswith("mm") for storage in later.joined.problem.storages)


def test_recipes() -> None:
    step = captured(region(6))
    found = {recipe.name: recipe for recipe in recipes(joined(step), ACCOUNT)}
    assert list(found)[:2] == ["save all", "per block"]
    assert "every 2 blocks" in found
    assert found["save all"].peak_gb * GIB == make_plan(step, ACCOUNT, ROOMY).plain.peak_bytes
    assert found["save all"].added_time == 0
    for recipe in found.values():
        assert make_plan(step, ACCOUNT, int(recipe.peak_gb * GIB)).added_time <= recipe.added_time


def test_recipes_include_the_optimizer_step() -> None:
    account = replace(ACCOUNT, optimizer_temporaries=10**6)
    peaks = {recipe.peak_gb * GIB for recipe in recipes(joined(captured()), account)}
    assert peaks == {account.optimizer_step_bytes(512)}


def test_module_rows() -> None:
    both = joined(captured(region(2)))
    names = [op.name.split(" of ")[0] for op in both.problem.ops]
    first = [names.index(name) for name in ("mm", "gelu", "mm_1", "gelu_1", "sum_1")]
    rest = range(first[-1] + 1, len(names))
    schedule = Schedule((*first, *rest[:1], names.index("mm"), names.index("gelu"), names.index("gelu"), *rest[1:]))
    schedule.check(both.problem)
    assert_expected_inline(
        "\n".join(
            f"{row.path or '(model)'}: saved {row.saved_bytes} B, {row.recomputed_bytes} B by {row.recomputed_ops} "
            f"again of {row.ops}, {row.added_seconds / row.seconds:.0f} times more"
            for row in module_rows(both, schedule)
        ),
        """\
layers.0.linear: saved 0 B, 4096 B by 1 again of 1, 1 times more
layers.0: saved 0 B, 8192 B by 2 again of 1, 2 times more
layers.1.linear: saved 4096 B, 0 B by 0 again of 1, 0 times more
layers.1: saved 0 B, 0 B by 0 again of 1, 0 times more
(model): saved 0 B, 0 B by 0 again of 1, 0 times more""",
    )


def test_bytes_held_after_the_forward() -> None:
    problem = joined(captured(region(2))).problem
    # The backward reads both products and the first gelu; the loss is the output.
    assert held_after_forward(problem, Schedule.save_all(problem)) == 3 * 64 * 16 * 4 + 512


@pytest.mark.slow
def test_bytes_between_too_many_and_too_few_are_tried_on_a_card() -> None:
    """With the allocator's overhead taken off, the first schedule exceeds the budget and the next budget has none: what
    fits in between is faster than the schedule with the smallest peak."""
    with torch.device("meta"):
        config = GPT2Config(n_layer=2, n_embd=64, n_head=4, n_positions=128, vocab_size=128)
        model = GPT2LMHeadModel(config).train()
        ids = torch.zeros(64, 128, dtype=torch.long)
    options: dict[str, Any] = {"device": "h100", "precision": "fp32", "backend": "aten", "effort": "fast"}
    batch = {"input_ids": ids, "labels": ids}
    roomy = memopt.plan(model, 100, batch, allow={"recompute", "reinplace"}, **options)
    plan = roomy.at(1.002 * roomy.smallest_gb())
    assert plan.joined is not None
    assert plan.added_seconds < 0.8 * plan.joined.smallest.added_seconds
