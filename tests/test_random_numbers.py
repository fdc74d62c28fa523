"""What memopt does by itself takes no number from the generators of Python, numpy and torch, which scripts seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import memopt

PROGRAM = """
import random, warnings
import numpy, torch
from torch import nn

warnings.simplefilter("ignore")


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def through(self, x):
        for layer in self.layers:
            if {condition}:
                x = x + layer(x)
        return x

    def forward(self, x):
        return self.through(x).square().mean()


def states():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()


def train(budget_gb):
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    model = LayerDrop()
    optimizer = torch.optim.AdamW(model.parameters())
    batches, found = torch.randn(3, 512, 64), []
    if budget_gb:
        import memopt
        memopt.optimize(model, budget_gb, optimizer=optimizer, precision="fp32", allow={{"recompute", "reinplace"}})
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), states()))
        if budget_gb:
            {look}
    return found


ours = train(0.0065)
assert ours == train(None), "other numbers were drawn"
"""


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["True", "random.random() < 0.7"], ids=["in one graph", "in regions"])
def test_a_script_that_draws_in_its_forward(condition: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"  # a file, as Dynamo skips code that has none
    look = "str(memopt.status(model)), str(memopt.plan_of(model)), memopt.plan_of(model).smallest_gb"
    script.write_text(PROGRAM.format(condition=condition, look=look))
    environment = {**os.environ, "PYTHONPATH": str(Path(memopt.__file__).parents[1]), "MEMOPT_PLAN": "always"}
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "planned" in ran.stderr
