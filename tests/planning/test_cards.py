"""What other cards would do for a planned step, from its own graphs: as plans for those cards say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from memopt.device import known_hardware
from memopt.errors import GIB
from memopt.planning.cards import OnCard
from tests import smallest

OPTIONS: dict[str, Any] = {"precision": "fp32", "effort": "fast"}
RECOMPUTING: dict[str, Any] = {**OPTIONS, "allow": {"recompute"}}
"""Fewer sets of levers are planned for each card."""


def model() -> GPT2LMHeadModel:
    with torch.device("meta"):
        made = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=256, n_head=4, use_cache=False)).train()
    made.loss_type = "ForCausalLM"
    return made


def batch(size: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("input_ids", "labels"), torch.zeros(size, 512, dtype=torch.long, device="meta"))


KNOWN = ("h100", "l4", "rtx-3060", "rtx-4090", "cpu")
"""The hardware that is looked through."""


def on_cards(**options: Any) -> dict[str, OnCard]:
    assert set(KNOWN) <= set(known_hardware())
    plan = memopt.plan(model(), 24, batch(64), device="rtx-4090", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt.planning.cards.known_hardware", lambda: KNOWN)
        return {row.name: row for row in plan.cards()}


@pytest.fixture(scope="module")
def rows() -> dict[str, OnCard]:
    return on_cards(**RECOMPUTING)


@pytest.mark.slow
def test_every_card_is_there_by_memory(rows: dict[str, OnCard]) -> None:
    assert set(rows) == set(KNOWN) - {"cpu"}
    memory = [row.memory_bytes for row in rows.values()]
    assert memory == sorted(memory)
    assert all(row.fits == (row.needed_bytes <= row.memory_bytes) for row in rows.values())


@pytest.mark.slow
def test_a_step_that_recomputes_nothing_has_one_peak() -> None:
    """With precision's casts, the gaps of an allocator that has room are more than those of a full card."""
    plan = memopt.plan(model(), 24, batch(8), device="rtx-4090", effort="fast")
    assert plan.added_seconds == 0
    assert plan.plain == plan.planned


@pytest.mark.slow
def test_a_row_is_what_a_plan_for_that_card_says(rows: dict[str, OnCard]) -> None:
    """Within the card's memory the plan is at least as fast, since it may try more sets of levers."""
    row, there = rows["l4"], memopt.plan(model(), rows["l4"].memory_bytes / GIB, batch(64), device="l4", **RECOMPUTING)
    assert row.seconds == pytest.approx(there.step_seconds + there.added_seconds, rel=0.02)
    assert row.added_time == pytest.approx(there.added_time, abs=0.01)
    refused = smallest.refusal(model(), batch(64), device="l4", precision="fp32", allow={"recompute"})
    assert row.needed_bytes == pytest.approx(refused.smallest_bytes, rel=0.02)


@pytest.mark.slow
def test_the_batch_grows_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a batch so small (4 × 64 tokens) that parameters take most of the memory: an RTX 5090 has a third more
    than a 4090."""
    monkeypatch.setattr("memopt.planning.cards.known_hardware", lambda: ("rtx-4090", "rtx-5090", "a100-80", "h100"))
    small = dict.fromkeys(("input_ids", "labels"), torch.zeros(4, 64, dtype=torch.long, device="meta"))
    plan = memopt.plan(model(), 24, small, device="rtx-4090", precision="fp32", effort="fast", allow={"recompute"})
    found = {row.name: row.batches for row in plan.cards()}
    assert 1.25 < found["rtx-5090"] / found["rtx-4090"] < 1.45
    assert found["h100"] == pytest.approx(found["a100-80"], rel=0.05)


@pytest.mark.slow  # a minute of planning
def test_the_batch_is_about_the_largest() -> None:
    row = on_cards(**OPTIONS)["rtx-3060"]
    largest = memopt.max_batch(model(), row.memory_bytes / GIB, batch, device="rtx-3060", multiple_of=64, **OPTIONS)
    assert 64 * row.batches == pytest.approx(largest, rel=0.2)


@pytest.mark.slow
def test_other_units_and_a_cpu_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.planning.cards.known_hardware", lambda: ("t4", "rtx-4090"))
    low = memopt.plan(model(), 24, batch(4), device="rtx-4090", precision="bf16", effort="fast")
    assert [row.name for row in low.cards()] == ["rtx-4090"]
    assert memopt.plan(model(), 24, batch(4), device="cpu", **OPTIONS).cards() == ()
