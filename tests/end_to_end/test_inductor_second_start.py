"""A job through inductor that starts again finds its code in inductor's cache, and compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = """
import hashlib, json
import torch
from torch import nn
from torch._dynamo.utils import counters
import memopt

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).train(), torch.randn(64, 32)
memopt.optimize(model, 1.0, optimizer=None, precision="fp32", backend="inductor")
model(x).square().mean().backward()
digest = hashlib.sha256(b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters()))
print(json.dumps({"counters": counters["inductor"], "gradients": digest.hexdigest()}))
"""


def start(folder: Path) -> dict[str, Any]:
    """The counters of inductor and a digest of the gradients, from a job in a process of its own."""
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "MEMOPT_CACHE_DIR": str(folder / "memopt"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
    }
    ran = subprocess.run([sys.executable, "-c", JOB], env=os.environ | settings, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def libraries(folder: Path) -> set[Path]:
    return set((folder / "inductor").rglob("*.so"))


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, compiled = start(tmp_path), libraries(tmp_path)
    halves = first["counters"]["fxgraph_cache_miss"]
    assert halves == 2
    assert compiled
    second = start(tmp_path)
    assert second["counters"]["fxgraph_cache_hit"] == halves
    assert not {"fxgraph_cache_miss", "fxgraph_cache_bypass"} & second["counters"].keys()
    assert libraries(tmp_path) == compiled
    assert second["gradients"] == first["gradients"]
