"""What plans ask of `memopt.show` by name, where no type checker looks, is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import memopt.planning
from memopt.planning.frontier import shown

PLANNING = Path(memopt.planning.__path__[0])
ASKED = [
    found
    for file in PLANNING.glob("*.py")
    for found in re.findall(r"shown\(['\"](\w+)['\"]\)\.(\w+)", file.read_text())
]


@pytest.mark.parametrize(("module", "function"), sorted(set(ASKED)))
def test_it_is_there(module: str, function: str) -> None:
    assert callable(getattr(shown(module), function))


def test_planning_loads_nothing_that_shows() -> None:
    text = "import sys, memopt.planning.call_planner; print([name for name in sys.modules if 'memopt.show' in name])"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout == "[]\n"
