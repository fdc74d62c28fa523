"""Plans for a GPU include the memory that torch's allocator holds; plans for the CPU do not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from examples.models.problems import random_problem
from memopt.account.account import Account, breakdown
from memopt.account.allocator_replay import (
    AllocatorPeaks,
    StepBlocks,
    replay,
    replay_with_spare,
    step_calls,
    with_spare,
    without_spare,
)
from memopt.account.caching_allocator import CardFullError
from memopt.compat.card import expandable_segments
from memopt.device.workspace_cuda import library_workspaces
from memopt.errors import GIB, BudgetError, as_text_has_it, round_up
from memopt.levers.all import may_expand
from memopt.planning import joined as on_cards
from memopt.planning.joined import SPARE, SPARE_COMPILED, Joined, _step_blocks, compiled_within, on_card, within
from memopt.planning.options import budget_bytes
from memopt.planning.planner import Request, least_on_card, smallest, solve_on_card, solve_with_steps
from memopt.planning.priced_step import PricedStep
from memopt.solver import Link, Portfolio, Schedule
from memopt.solver.problem import BlockCall
from tests.planned import captured, make_plan, region

MB = 1024**2
PARAMETERS = 4 * 512 * 512 * 4
CONTEXT = 500 * MB
ACCOUNT = Account(
    parameters=PARAMETERS,
    buffers=0,
    inputs=8 * MB,
    optimizer_state=2 * PARAMETERS,
    optimizer_temporaries=PARAMETERS,
    gradients=PARAMETERS,
    reserve=CONTEXT + sum(library_workspaces(9)),
    context=CONTEXT,
)


@pytest.fixture(scope="module")
def step() -> PricedStep:
    """A step with activations of 8 MB."""
    return captured(region(4, width=512, batch=4096))


@pytest.fixture(autouse=True)
def default_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


def joined(step: PricedStep) -> Joined:
    return step.problem


def test_on_the_cpu_nothing_is_added(step: PricedStep) -> None:
    bare = replace(ACCOUNT, context=0)
    schedule = Schedule.save_all(joined(step).problem)
    assert on_card(joined(step), schedule, bare) == bare
    assert within(joined(step), schedule, bare, 1) == bare, "the solver keeps the budget"
    assert make_plan(step, bare, 1 << 30).account == bare


def test_the_allocator_calls_of_a_schedule_are_found_once(step: PricedStep) -> None:
    problem = replace(joined(step))
    schedule = Schedule.save_all(problem.problem)
    with mock.patch.object(on_cards, "step_ways", wraps=on_cards.step_ways) as found:
        assert within(problem, schedule, ACCOUNT, GIB // 8) is None
        on_card(problem, schedule, ACCOUNT)
        on_card(problem, schedule, replace(ACCOUNT, expandable=True))
    assert found.call_count == 1
    problem.forget_solvers()
    assert not problem.ways


def test_the_peak_includes_the_memory_that_the_allocator_must_hold(step: PricedStep) -> None:
    problem, schedule = joined(step).problem, Schedule.save_all(joined(step).problem)
    account = on_card(joined(step), schedule, ACCOUNT)
    assert account.fragmentation > 0
    held = breakdown(problem, schedule, account).peak_bytes - CONTEXT
    blocks = StepBlocks(
        resident=(*[MB] * 4, 8 * MB, *library_workspaces(9)), state=(*[MB] * 4, 4 * MB), temporaries=(*[MB] * 4,)
    )
    free = replay(step_calls(problem, schedule), blocks, expandable_segments=False)
    assert free.allocated_bytes <= held <= free.reserved_bytes
    assert on_card(joined(step), schedule, account) == account, "the overhead is counted once"


def test_plans_keep_the_budget_with_the_allocators_overhead(step: PricedStep) -> None:
    roomy = make_plan(step, ACCOUNT, 1 << 30)
    least, _ = smallest(joined(step), ACCOUNT)
    for share in (0.0, 0.3, 0.8):
        budget = int(least + share * (roomy.plain.peak_bytes - least))
        plan = make_plan(step, ACCOUNT, budget)
        assert plan.predicted_peak_bytes <= budget
        assert within(joined(step), plan.schedule, ACCOUNT, budget) == plan.account
    with pytest.raises(BudgetError) as refused:
        make_plan(step, ACCOUNT, least - 20 * MB)
    assert refused.value.smallest_bytes == least


def test_the_budget_that_is_named_has_been_replayed_itself(step: PricedStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget may fail the replay though a smaller one passes, and the least limit that passes be below the peak."""
    least, _ = smallest(joined(step), ACCOUNT)
    first, last = least - CONTEXT - MB, least - CONTEXT + 20 * MB

    def fails_between(*args: Any, limit_bytes: int, **kwargs: Any) -> AllocatorPeaks:
        if first < limit_bytes < last:
            raise CardFullError("a gap that no block fits")
        return replay_with_spare(*args, limit_bytes=limit_bytes, **kwargs)

    monkeypatch.setattr("memopt.planning.joined.replay_with_spare", fails_between)
    again = captured(*step.traced.regions).priced_for(hardware=step.settings.hardware)  # which knows no figure yet
    named, _ = smallest(joined(again), ACCOUNT)
    assert last + CONTEXT <= named < 1.01 * (last + CONTEXT)
    assert within(joined(again), joined(again).smallest.schedule, ACCOUNT, named) is not None
    with pytest.raises(BudgetError) as refused:
        make_plan(again, ACCOUNT, least)
    assert refused.value.smallest_bytes == named
    assert make_plan(again, ACCOUNT, budget_bytes(float(round_up(named / GIB)))).predicted_peak_bytes <= named


def test_where_the_allocator_refuses_all_others_a_schedule_known_from_another_budget_is_taken(
    step: PricedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(ACCOUNT, 1 << 30)
    portfolio = joined(step).portfolio
    assert isinstance(portfolio, Portfolio)
    *_, slowest = portfolio.known_within(request.graph_bytes)
    assert slowest.added_seconds > 0

    def only_that(joined: Joined, schedule: Schedule, *args: Any) -> Account | None:
        return within(joined, schedule, *args) if schedule == slowest.schedule else None

    monkeypatch.setattr("memopt.planning.planner.within", only_that)
    assert solve_on_card(joined(step), request)[1].schedule == slowest.schedule


def test_a_refusal_names_no_smaller_budget_than_the_one_given(
    step: PricedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator of a process with more memory returns segments later, and may run out where it did not before."""
    least, _ = smallest(joined(step), ACCOUNT)
    budget, works = least + MB, int(1.01 * least)

    def fails_below(joined: Joined, schedule: Schedule, account: Account, budget_bytes: int) -> Account | None:
        return within(joined, schedule, account, budget_bytes) if budget_bytes >= works else None

    monkeypatch.setattr("memopt.planning.planner.within", fails_below)
    with pytest.raises(BudgetError, match="leaves room for the gaps between the allocator's blocks") as info:
        make_plan(step, ACCOUNT, budget)
    assert works <= info.value.smallest_bytes < 1.01 * works
    assert not info.value.least
    assert make_plan(step, ACCOUNT, info.value.smallest_bytes).predicted_peak_bytes <= info.value.smallest_bytes


@pytest.mark.slow
def test_the_smallest_schedule_does_not_depend_on_what_was_solved_for_before() -> None:
    """Where values may be offloaded, several schedules have the smallest peak, and the allocator needs more for some of
    them: a budget that a refusal named was refused."""
    problem, link = random_problem(random.Random(0), 16), Link(1.0)
    fresh, used = (Joined(problem, (), (), link=link) for _ in range(2))
    peak = used.portfolio.smallest().peak_bytes
    for share in (1.0, 1.02, 1.05, 1.1, 1.3):
        used.portfolio.solve(int(share * peak))
        used.offloads.solve(int(share * peak), link)
    used.offloads.solve(fresh.smallest.peak_bytes, link)
    assert used.smallest.schedule == fresh.smallest.schedule


def test_a_budget_below_the_smallest_is_refused_after_one_attempt(
    step: PricedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule fits the budget less the allocator's gaps, so that the solver alone would not refuse it."""
    least, _ = smallest(joined(step), ACCOUNT)
    budget = int(0.995 * least)
    attempts = []

    def counted(joined: Joined, request: Request) -> Any:
        attempts.append(request)
        return solve_with_steps(joined, request)

    monkeypatch.setattr("memopt.planning.planner.solve_with_steps", counted)
    with pytest.raises(BudgetError) as refused:
        make_plan(captured(*step.traced.regions), ACCOUNT, budget)
    assert refused.value.smallest_bytes == least
    assert len(attempts) == 1


def test_a_budget_below_a_smallest_that_is_known_is_refused_without_an_attempt(
    step: PricedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a model is optimised again with half a percent less than what its refusal named."""
    least, _ = smallest(joined(step), ACCOUNT)
    step.traced.forget_solvers()

    def never(*args: Any) -> Any:
        raise AssertionError("the smallest budget is known")

    monkeypatch.setattr("memopt.planning.planner.solve_with_steps", never)
    monkeypatch.setattr(Portfolio, "solve", never)
    monkeypatch.setattr(Portfolio, "smallest", never)
    with pytest.raises(BudgetError) as refused:
        make_plan(step, ACCOUNT, int(0.995 * least))
    assert refused.value.smallest_bytes == least


def test_compiled_code_that_has_the_allocator_return_segments_leaves_more_spare(step: PricedStep) -> None:
    """On a full card, the segment of a block that is freed is returned for a larger block."""
    schedule = Schedule.save_all(joined(step).problem)

    def held(sizes: list[int], budget_bytes: int) -> tuple[int, int]:
        calls = [BlockCall(makes, number, size) for number, size in enumerate(sizes) for makes in (True, False)]
        account = compiled_within(joined(step), schedule, ACCOUNT, [calls], budget_bytes)
        blocks = _step_blocks(joined(step), ACCOUNT)
        limit = budget_bytes - CONTEXT
        found = replay(calls, blocks, expandable_segments=False, limit_bytes=without_spare(limit, SPARE))
        return breakdown(joined(step).problem, schedule, account).peak_bytes - CONTEXT, found.reserved_bytes

    bytes_held, reserved = held([200 * MB], 4 << 30)
    assert bytes_held == with_spare(reserved, SPARE_COMPILED)
    bytes_held, reserved = held([200 * MB, 300 * MB], CONTEXT + 480 * MB)
    assert bytes_held == with_spare(reserved, SPARE)


@pytest.mark.parametrize("seed", range(40))
def test_the_budget_that_compiled_code_is_said_to_need_is_enough(step: PricedStep, seed: int) -> None:
    """With other limits the allocator returns other segments, and a larger one is not always enough."""
    draw = random.Random(seed)
    alive: dict[int, int] = {}
    calls: list[BlockCall] = []
    for number in range(120):
        if alive and draw.random() < 0.5:
            ended = draw.choice(list(alive))
            calls.append(BlockCall(False, ended, alive.pop(ended)))
        alive[number] = draw.randrange(1, 60) * MB
        calls.append(BlockCall(True, number, alive[number]))
        if len(alive) > 12:
            ended = draw.choice(list(alive))
            calls.append(BlockCall(False, ended, alive.pop(ended)))
    schedule = Schedule.save_all(joined(step).problem)

    def peak(budget_bytes: int) -> int:
        account = compiled_within(joined(step), schedule, ACCOUNT, [calls], budget_bytes)
        return breakdown(joined(step).problem, schedule, account).peak_bytes

    needed = peak(CONTEXT + MB)
    assert needed > CONTEXT + MB
    assert needed == as_text_has_it(needed), "what a user types is what was replayed"
    assert peak(needed) <= needed


def test_expandable_segments_leave_less_unused(step: PricedStep) -> None:
    schedule = Schedule.save_all(joined(step).problem)
    apart = on_card(joined(step), schedule, ACCOUNT)
    together = on_card(joined(step), schedule, replace(ACCOUNT, expandable=True))
    assert together.uncounted_bytes + together.rounding < apart.uncounted_bytes + apart.rounding


def test_expandable_segments_are_used_where_ordinary_ones_do_not_fit_or_add_time(step: PricedStep) -> None:
    either, expandable = replace(ACCOUNT, may_expand=True), replace(ACCOUNT, expandable=True)
    least = {account: smallest(joined(step), account)[0] for account in (ACCOUNT, expandable, either)}
    assert least[either] == min(least.values()) < least[ACCOUNT]
    by_least = least_on_card(joined(step), joined(step).smallest.schedule, either)
    assert breakdown(joined(step).problem, joined(step).smallest.schedule, by_least).peak_bytes == least[either]
    _, _, account = solve_on_card(joined(step), Request(either, least[either]))
    assert account.expands
    with pytest.raises(BudgetError):
        solve_on_card(joined(step), Request(ACCOUNT, least[either]))
    _, solution, account = solve_on_card(joined(step), Request(either, 2**40))
    assert not account.expandable
    assert account.may_expand
    _, apart, _ = solve_on_card(joined(step), Request(ACCOUNT, least[ACCOUNT]))
    _, solution, _ = solve_on_card(joined(step), Request(either, least[ACCOUNT]))
    assert solution.added_seconds <= apart.added_seconds


@pytest.mark.parametrize(
    ("setting", "is_on", "may_be"),
    [
        ("", False, True),
        ("expandable_segments:True", True, False),
        ("a:1,expandable_segments: True", True, False),
        ("expandable_segments:False", False, False),
        ("backend:cudaMallocAsync", False, False),
    ],
)
def test_the_allocators_setting(setting: str, is_on: bool, may_be: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    assert expandable_segments() is is_on
    assert may_expand({"expandable_segments"}) is may_be
    assert not may_expand({"recompute"})


def test_the_optimizer_makes_its_state_in_blocks_of_the_size_of_its_tensors(step: PricedStep) -> None:
    codes = (PARAMETERS // 4, PARAMETERS // 256) * 2
    account = replace(ACCOUNT, optimizer_state=sum(codes), state_blocks=codes)
    assert _step_blocks(joined(step), account).state == codes
    with_others = replace(account, optimizer_state=sum(codes) + MB)
    assert _step_blocks(joined(step), with_others).state == (*codes, MB), "what no tensor is known of comes last"
