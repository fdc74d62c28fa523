"""What a type checker says of a user's program: wrong names are refused, and right ones are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import memopt
from memopt.levers.all import LeverName

ROOT = Path(memopt.__file__).parents[1]
# torch is not read, which takes a minute: what it defines is `Any`.
SETTINGS = """[mypy]
strict = true
follow_imports = silent
ignore_missing_imports = true
[mypy-torch.*,numpy.*,networkx.*,rich.*,click.*,matplotlib.*,transformers.*,sympy.*]
follow_imports = skip
"""
PROGRAM = """import memopt
from torch import nn

def train(model: nn.Module, batch: object) -> None:
    memopt.optimize(model, 1.0, precision="bf16", backend="aten", allow={"recompute", "fp8"}, effort="best")
    memopt.optimize(model, 1.0, allow=memopt.DEFAULT_LEVERS | {"fp8"}, precision={"default": "bf16", "lm_head": "fp32"})
    chosen = memopt.DEFAULT_LEVERS | {"offload_optimizer"} | {"optimizer_in_backward"}
    memopt.plan(model, 1.0, batch, allow=chosen, device="h100")
    memopt.plan(model, 1.0, batch, allow=memopt.DEFAULT_LEVERS - {"recompute"})
    memopt.frontier(model, batch, allow=["recompute", memopt.LEVERS["fp8"]])
"""
WRONG = {
    'memopt.optimize(model, 1.0, precision="bf61")': "precision",
    'memopt.optimize(model, 1.0, allow={"fpp8"})': "fpp8",
    'memopt.optimize(model, 1.0, allow=memopt.DEFAULT_LEVERS | {"fpp8"})': "fpp8",
    'memopt.plan(model, 1.0, batch, backend="inducter")': "backend",
    'memopt.max_batch(model, 1.0, lambda size: batch, precision="fp61", allow={"recomputed"})': "recomputed",
    'memopt.plan(model, 1.0, batch, outputs="some")': "outputs",
}


def test_the_literal_names_the_levers() -> None:
    allowed = {name for name, lever in memopt.LEVERS.items() if getattr(lever, "option", "allow") == "allow"}
    assert set(get_args(LeverName)) == allowed


@pytest.mark.slow
def test_wrong_names_are_refused_and_right_ones_are_not(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    right = PROGRAM.splitlines()
    (tmp_path / "program.py").write_text("\n".join([*right, *(f"    {line}" for line in WRONG), ""]))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "program.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    said: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if line.startswith("program.py:"):
            _, number, text = line.split(":", 2)
            said[int(number)] = said.get(int(number), "") + text
    assert set(said) == {len(right) + 1 + n for n in range(len(WRONG))}, done.stdout
    for number, name in enumerate(WRONG.values(), len(right) + 1):
        assert name in said[number], done.stdout
