"""What the extension exports, and with which types."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["memopt.solver._kernels"] = None
import numba
from memopt.solver import Portfolio, warm_up
from memopt.solver.native import entries, signature
import memopt.solver.polish, memopt.solver.repair
from examples.models.problems import chain

warm_up()
names = {kernel.__name__ for kernel in entries()}
assert {"_replay_all", "_drop_all", "_count_changes", "fill", "choose", "_wait", "_loosen"} <= names, names
for module in (memopt.solver.polish, memopt.solver.repair):
    for dispatcher in vars(module).values():
        if dispatcher in entries():
            assert dispatcher.signatures == [signature(dispatcher.py_func)], dispatcher
"""


@pytest.mark.slow
def test_annotations_give_the_types_that_the_portfolio_calls_with() -> None:
    pytest.importorskip("numba")
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
