"""The examples run as they are printed and do what they say: training programs and notebooks stay within their budgets,
passes and solvers of one's own better a plan."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from examples.custom_solver import NoisyPrices

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def printed_by(example: str, *arguments: str) -> str:
    """Run an example in a process of its own, with one thread, and return the text that it prints."""
    return printed_by_command(str(EXAMPLES / example), *arguments)


def printed_by_command(*command: str) -> str:
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True, env=surroundings, cwd=ROOT
    ).stdout


def code_of(notebook: Path) -> str:
    """Return the code of a notebook's cells, in order."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def stays_within_its_budget(printed: str) -> None:
    """Assert that a training program shows a plan that needs levers, and measures no step above its budget."""
    steps = re.findall(r"^step \d+  loss (\S+)  peak ([\d.]+) of ([\d.]+) GB$", printed, re.MULTILINE)
    assert len(steps) >= 4, printed
    for loss, peak, budget in steps:
        assert math.isfinite(float(loss))
        assert float(peak) <= float(budget)
    assert re.search(r"^│ recompute +│", printed, re.MULTILINE), "the budget asks for nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    ["nanogpt.py", "diffusion_unet.py", "lora.py"],
)
def test_training_programs(example: str) -> None:
    if example == "lora.py":
        pytest.importorskip("peft")
    stays_within_its_budget(printed_by(example, "--small"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda notebook: notebook.name)
def test_notebooks(notebook: Path, tmp_path: Path) -> None:
    program = tmp_path / "cells.py"
    program.write_text(f"{code_of(notebook)}\nprint(memopt.plan_of(model))\n", encoding="utf-8")
    stays_within_its_budget(printed_by_command(str(program)))


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda notebook: notebook.name)
def test_notebooks_have_outputs_and_show_objects(notebook: Path) -> None:
    """Made by `python -m benchmarks.notebooks`."""
    cells = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    shown = [output["data"] for cell in cells for output in cell["outputs"] if "data" in output]
    assert len(shown) >= 3
    assert all({"text/html", "image/svg+xml"} & set(data) for data in shown)
    assert not re.search(r"print\((memopt|plan|comparison)", code_of(notebook))


def test_every_example_is_run_by_a_test() -> None:
    """The demo too, by `make demo`, which takes minutes."""
    tests = Path(__file__).read_text(encoding="utf-8")
    scripts = {file.name for file in EXAMPLES.glob("*.py")} - {"train_gpt2_within_budget.py"}
    assert all(f'"{name}"' in tests for name in scripts)


@pytest.mark.parametrize(("example", "most"), [("custom_pass.py", 40), ("custom_solver.py", 60)])
def test_they_are_short(example: str, most: int) -> None:
    assert len((EXAMPLES / example).read_text(encoding="utf-8").splitlines()) <= most


@pytest.mark.slow
def test_the_pass_is_in_the_receipt_and_the_diff_and_lowers_the_peak() -> None:
    without, with_pass = printed_by("custom_pass.py").split("GPT2LMHeadModel, planned for ")[1:]
    peaks = [float(re.findall(r"peak ([\d.]+) MB", text)[0]) for text in (without, with_pass)]
    assert peaks[1] < 0.9 * peaks[0]
    assert "TanhAsSigmoid" not in without
    assert re.search(r"^│ TanhAsSigmoid +│ [\d.]+ MB │ [\d.]+ MB │", with_pass, re.MULTILINE), "no row in the receipt"
    assert re.search(r"^- *tanh", with_pass, re.MULTILINE), "no removed call in the diff"
    assert re.search(r"^\+ *sigmoid", with_pass, re.MULTILINE), "no added call in the diff"


@pytest.mark.slow
def test_the_solver_betters_a_plan() -> None:
    """The example's model at the first of its budgets."""
    config = GPT2Config(vocab_size=256, n_embd=256, n_head=8, n_layer=4, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
        ids = torch.zeros(8, 512, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"optimizer": None, "precision": "fp32", "allow": {"recompute"}, "device": "cpu"}
    budget_gb = 1.005 * memopt.plan(model, 8, batch, **options).smallest_gb()
    own, custom = (
        memopt.plan(model, budget_gb, batch, solvers=solvers, **options) for solvers in ([], [NoisyPrices()])
    )
    assert custom.method.startswith("noisy prices")
    assert own.bound <= custom.added_time < own.added_time
    assert custom.predicted_peak_gb <= budget_gb


@pytest.mark.slow  # three budgets, a minute
def test_the_solver_betters_a_plan_at_one_budget_at_least() -> None:
    plans = re.findall(r"^  ([\d.]+)% by ([^;]+);", printed_by("custom_solver.py"), re.MULTILINE)
    pairs = [(plans[number], plans[number + 1]) for number in range(0, len(plans), 2)]
    assert len(pairs) == 3
    assert any(float(custom[0]) < float(own[0]) and "noisy prices" in custom[1] for own, custom in pairs)
    assert all(float(custom[0]) <= float(own[0]) for own, custom in pairs)
