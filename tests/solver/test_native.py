"""The kernels compute the same ready-made, compiled by numba, and as plain Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_machine_code_of_another_source_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Numba sees neither that a kernel calls one that has changed, nor that a class in its index is gone."""
    numba = pytest.importorskip("numba")
    folders = set()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    for made_from in (1, 2):
        monkeypatch.setattr(native, "fingerprint", lambda made_from=made_from: made_from)
        folders.add(native._compiled(native.entry_name, {})._cache.cache_path)
    assert len(folders) == 2
    assert str(tmp_path) == numba.config.CACHE_DIR
