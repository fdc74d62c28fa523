"""The kernels compute the same ready-made, compiled by numba, and as plain Python."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memopt.solver import native

SOLVE = """
import random, sys
for module in {blocked}:
    sys.modules[module] = None
from memopt.solver import Link, OffloadPortfolio, Portfolio
from memopt.solver.native import is_compiled, ready_made
from examples.models.problems import chain, random_problem
assert is_compiled() == ("numba" not in {blocked} or "memopt.solver._kernels" not in {blocked})
for problem in (chain(8), random_problem(random.Random(3), 10)):
    portfolio = Portfolio(problem)
    smallest = portfolio.smallest()
    print(smallest, portfolio.solve(smallest.peak_bytes + 12))
    print(OffloadPortfolio(problem, portfolio).solve(smallest.peak_bytes + 2, Link(9.0)))
"""
READY_MADE = "memopt.solver._kernels"


def plans(*blocked: str) -> str:
    command = [sys.executable, "-c", SOLVE.format(blocked=blocked)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_the_plans_are_the_same_in_all_three_ways() -> None:
    assert plans(READY_MADE, "numba") == plans(READY_MADE)
    if native.ready_made() is not None:
        assert plans("numba") == plans(READY_MADE)


def test_every_module_with_a_kernel_decides_the_fingerprint() -> None:
    folder = native.kernel_sources()[0].parent
    with_kernels = {path for path in folder.rglob("*.py") if "\n@native" in path.read_text()}
    assert with_kernels <= set(native.kernel_sources())


def test_kernels_made_from_another_source_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.ready_made() is None:
        pytest.skip("no ready-made kernels: pip install -e . makes them")
    monkeypatch.setattr(native, "fingerprint", lambda: 1)
    assert native.ready_made.__wrapped__() is None
