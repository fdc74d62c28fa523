"""Random modules, budgets, optimisers and schedules: a few seeds of `python -m benchmarks.fuzz`, and those it found."""

from __future__ import annotations

import pytest

from examples.models.random_trials import trial

SEEDS = (1, 6)
FOUND = (300,)
"""Seeds that were not right once."""


@pytest.mark.parametrize("seed", [*SEEDS, *FOUND])
def test_a_random_module_trains_as_the_plain_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    found = trial(seed)
    assert found.verdict == "right", found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_further_random_modules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    found = trial(seed)
    assert found.verdict in ("right", "rounding"), found
