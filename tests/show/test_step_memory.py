"""What pages and pictures draw of a step is what the simulator and the account count, at every moment."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from memopt.account.account import ANY_LINK, OPTIMIZER_STEP, live_bytes_by_kind
from memopt.planning.plan import Plan
from memopt.show.step import step_of
from memopt.solver import Link, simulate
from tests.planning.test_plan_networkx import PLANS


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def test_the_peaks_are_the_plan_s(plan: Plan) -> None:
    step = step_of(plan)
    assert step.planned.peak_bytes == plan.predicted_peak_bytes
    assert step.plain.peak_bytes == plan.plain.peak_bytes
    for memory, peak in ((step.planned, plan.planned), (step.plain, plan.plain)):
        assert (memory.peak == len(memory.evaluations)) == (peak.at == OPTIMIZER_STEP)
        for now in memory.evaluations[memory.peak : memory.peak + 1]:
            assert re.sub(r"^\d\.", "", step.ops[now.op].name) in peak.at  # without the number of the region


def test_every_moment_is_the_simulator_s(plan: Plan) -> None:
    assert plan.joined is not None
    assert plan.schedule is not None
    memory = step_of(plan).planned
    problem = plan.joined.problem
    simulated = simulate(problem, plan.schedule, ANY_LINK).live_bytes - problem.resident_bytes
    held = sum(memory.resident.values())
    assert memory.live_bytes[:-1] == tuple(held + int(live) for live in simulated)
    for moment in {0, memory.boundary - 1, memory.boundary, len(memory.evaluations) // 2, len(memory.evaluations) - 1}:
        kinds = Counter[str]()
        for _, row, nbytes in memory.alive(moment):
            kinds[row] += nbytes
        assert +kinds == +Counter(live_bytes_by_kind(problem, plan.schedule, moment))


def test_bytes_by_module_sum_up_to_what_is_held(plan: Plan) -> None:
    step = step_of(plan)
    for memory in (step.plain, step.planned):
        for moment in (0, memory.peak, len(memory.evaluations)):
            found = step.by_module(memory, moment)
            assert sum(rows.total() for rows in found.values()) == memory.live_bytes[moment]
    if plan.model == "GPT2LMHeadModel":
        own = step.by_module(step.planned, 0)["transformer.h.1.attn.c_attn"]
        assert own["parameters"] == 4 * (32 * 96 + 96)
        assert own["optimizer state"] == 2 * own["parameters"] * plan.account.optimizer_state // (
            2 * plan.account.parameters
        )


def test_times_are_the_plan_s(plan: Plan) -> None:
    memory = step_of(plan).planned
    assert memory.seconds == pytest.approx(plan.step_seconds + plan.added_seconds)
    starts = [one.start for one in memory.evaluations]
    assert starts == sorted(starts)
    assert sum(one.again for one in memory.evaluations) == plan.diff().recomputed
    assert sum(copy.nbytes for copy in memory.copies if copy.out) == plan.moved_bytes
    assert all(copy.end > copy.start for copy in memory.copies)


def test_the_link_is_the_step_s() -> None:
    plan = PLANS["offloaded"]()
    assert plan.captured is not None
    link = plan.priced.settings.link
    assert isinstance(link, Link)
    copies = step_of(plan).planned.copies
    assert copies
    for copy in copies:
        assert copy.end - copy.start == pytest.approx(link.transfer_seconds(copy.nbytes))


def test_operators_and_their_types() -> None:
    plan = PLANS["gpt2"]()
    step = step_of(plan)
    softmax = next(op for op in step.ops if op.name == "_safe_softmax_1")
    assert softmax.module == "transformer.h.1.attn"
    assert softmax.value == "f32[4, 2, 64, 64]"
    assert "sdpa_attention.py:" in softmax.source
    assert "scaled_dot_product_attention" in softmax.code
    assert {one[3] for one in step.types} == {"f32"}
    assert {one[2] for one in step.types} >= {"transformer.h.0.mlp.act", "lm_head"}
