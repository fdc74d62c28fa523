"""Random modules, budgets, optimisers and schedules: a few seeds of `python -m benchmarks.fuzz`, and those it found."""

from __future__ import annotations

import pytest

from examples.models.random_trials import trials

SEEDS = (1, 6)
FOUND = (300, 222, 78)
"""Seeds that were not right once."""


@pytest.mark.parametrize("seed", [*SEEDS, *FOUND])
def test_a_random_module_trains_as_the_plain_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    verdicts = [(found.verdict, found) for found in trials(seed)]
    assert all(verdict == "right" for verdict, _ in verdicts), verdicts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_further_random_modules(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    verdicts = [(found.verdict, found) for found in trials(seed)]
    assert all(verdict in ("right", "rounding, named") for verdict, _ in verdicts), verdicts
