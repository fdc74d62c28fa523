"""After `warm_up` no kernel is left to compile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memopt.solver import native

SCRIPT = """
import sys
sys.modules["memopt.solver._kernels"] = None
import numba
from numba.core import event

from memopt.solver import Portfolio, warm_up
from examples.models.problems import transformer

warm_up()
with event.install_recorder("numba:compile") as recorder:
    portfolio = Portfolio(transformer(layers=6))
    smallest = portfolio.smallest().peak_bytes
    portfolio.solve(2 * smallest)
assert not recorder.buffer, recorder.buffer
"""


@pytest.mark.slow
@pytest.mark.skipif(native.compiler() is None, reason="numba is not installed")
def test_nothing_is_left_to_compile() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
