from __future__ import annotations

from dataclasses import replace

from memopt.price.node_prices import host_seconds
from memopt.show.report import render
from tests.planned import ACCOUNT, captured, make_plan


def test_regions_and_gradients_take_time() -> None:
    assert 0 < host_seconds(1, 16) < host_seconds(1, 196) < host_seconds(2, 196)


def test_a_plan_tells_it_where_no_gpu_computes_meanwhile() -> None:
    for context, told in ((0, True), (512 * 1024**2, False)):
        plan = make_plan(captured(), replace(ACCOUNT, context=context), 10**9)
        assert ("of guards and accounting" in render(plan)) == told == (plan.host_seconds > 0)
