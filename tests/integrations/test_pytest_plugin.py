"""The fixture `assert_fits`, in a test run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import torch
from torch import nn

OPTIONS = {"loss_fn": nn.functional.mse_loss, "device": "cpu", "precision": "fp32"}
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).train()
    batch = torch.empty(512, 64), torch.empty(512, 8)

def test_fits(assert_fits):
    plan = assert_fits(model, batch, gb=1, **OPTIONS)
    assert plan.predicted_peak_gb < 1

def test_does_not_fit(assert_fits):
    assert_fits(model, batch, gb=0.0001, **OPTIONS)
"""


def test_the_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_memory.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "memopt.integrations.pytest_plugin"]
    around = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, "test_memory.py"], cwd=tmp_path, env=around, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "a budget of 0.0001 GB is too small for this step: the smallest that works is" in done.stdout
    assert "Traceback" not in done.stdout


def test_pytest_finds_it_where_memopt_is_installed() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"memopt": "memopt.integrations.pytest_plugin"}
