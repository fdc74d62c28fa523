from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from memopt.device.time_model import MEASURED_TIMES
from memopt.price.price import host_seconds
from memopt.show.report import headline
from tests.planned import ACCOUNT, captured, make_plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_regions_and_gradients_take_time() -> None:
    assert 0 < host_seconds(1, 16) < host_seconds(1, 196) < host_seconds(2, 196)


def test_the_added_time_has_it_where_no_gpu_computes_meanwhile() -> None:
    for context, told in ((0, True), (512 * 1024**2, False)):
        plan = make_plan(captured(), replace(ACCOUNT, context=context), 10**9)
        text = headline(plan)
        assert ("for Dynamo's guards and memopt's Python code" in text) == told == (plan.host_seconds > 0)
        found = re.search(r"added time ([\d.]+)%", text)
        assert found is not None
        everything = (plan.added_seconds + plan.host_seconds) / plan.step_seconds
        assert float(found[1]) == pytest.approx(100 * everything, abs=0.06)


def test_the_spread_of_times_is_what_was_measured() -> None:
    on_cpu = json.loads((RESULTS / "step_time.json").read_text())["rows"]
    ratios = [row["measured_ms"] / row["table_ms"] for row in on_cpu]
    (on_card,) = (
        dict(zip(subject["figures"], subject["rows"][0], strict=True))
        for subject in json.loads((RESULTS / "first_day_h100.json").read_text())["subjects"]
        if subject["subject"] == "time model"
    )
    ratios.append(on_card["median_ms"] / on_card["expected_ms"])
    assert (round(min(ratios), 2), round(max(ratios), 2)) == MEASURED_TIMES
