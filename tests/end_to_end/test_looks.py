"""How often Python's objects are looked through for memory elsewhere while lengths change from batch to batch."""

from __future__ import annotations

from typing import Any

import pytest

import memopt
from examples.models import language_models
from examples.models.language_models import SMALL_CONFIGS
from memopt.account import elsewhere
from tests.elsewhere import look

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
LENGTHS = (96, 16, 80, 24, 64, 32)


@pytest.mark.plans_always
@pytest.mark.slow
def test_a_backward_of_another_length_is_not_taken_for_memory_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = language_models.make(SMALL_CONFIGS["gpt2"](), samples=4, length=max(LENGTHS))
    budget_gb = 0.9 * memopt.plan(model, 1.0, batch, **EXACT).plain_peak_gb  # little room for what might have grown
    memopt.optimize(model, budget_gb, **EXACT)
    looks = []

    def counting(*args: Any, **kwargs: Any) -> elsewhere.Elsewhere:
        looks.append(1)
        return look(*args, **kwargs)

    monkeypatch.setattr(elsewhere, "look", counting)

    def step(length: int) -> None:
        model(**{key: value[:, :length] for key, value in batch.items()}).loss.backward()
        model.zero_grad()

    for length in LENGTHS:
        step(length)
    looks.clear()
    for length in 2 * LENGTHS:
        step(length)
    assert len(looks) <= 2
