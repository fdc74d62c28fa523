"""A refusal of a tiny problem comes soon: what the exact solver is asked for has a size."""

from __future__ import annotations

import random

import pytest

from examples.models.problems import random_problem
from memopt.solver import Infeasible, Portfolio, floor_bytes
from memopt.solver.stage_model import _LinearModel


@pytest.mark.parametrize("seed", [3, 11, 24])
def test_no_program_that_a_refusal_solves_is_large(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    solve = _LinearModel.solve

    def noted(self: _LinearModel, *args: object) -> object:
        sizes.append(self.variables)
        return solve(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(_LinearModel, "solve", noted)
    problem = random_problem(random.Random(seed), 24)
    with pytest.raises(Infeasible):
        Portfolio(problem).solve(floor_bytes(problem) - 1)
    assert all(size <= 1_100 for size in sizes)
