"""Commands about a job that was planned before: they show the same, and plan nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import memopt
from memopt.cli.main import main

MODEL = """from torch import nn
from width import WIDTH

def small():
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
"""
TARGET = ("--shape", "target=512:int64", "--loss", "cross_entropy")
STEP = ("small.py:small", "--shape", "512x64", *TARGET, "--device", "h100", "--budget-gb", "1")
COMMANDS = {
    "plan": ("plan", *STEP),
    "explain": ("explain", *STEP),
    "explain --json": ("explain", *STEP, "--json"),
    "explain --op": ("explain", *STEP, "--op", "addmm"),
    "explain --op --json": ("explain", *STEP, "--op", "0", "--json"),
    "diff": ("diff", *STEP),
    "diff --json": ("diff", *STEP, "--json"),
    "report": ("report", *STEP, "--to", "page.html"),
    "export trace": ("export", *STEP, "--to", "step.json"),
    "export dot": ("export", *STEP, "--to", "step.dot"),
}


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have each test begin with an empty cache and a model of its own; returns a list that `memopt.plan` adds to."""
    (tmp_path / "small.py").write_text(MODEL)
    (tmp_path / "width.py").write_text("WIDTH = 64\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "width", raising=False)  # that of another test
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    plan, made = memopt.plan, []

    def noting(*args: Any, **options: Any) -> Any:
        made.append(plan(*args, **options))
        return made[-1]

    monkeypatch.setattr(memopt, "plan", noting)
    return made


def shown(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a command; returns what it printed, and the file that it wrote."""
    assert main(command) == 0
    file = Path(command[command.index("--to") + 1]) if "--to" in command else None
    return [capsys.readouterr().out, file.read_text() if file else ""]


@pytest.mark.slow
def test_nothing_is_planned_again_and_everything_shown_is_the_same(
    planned: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(COMMANDS["plan"], capsys)
    kept = {name: shown(command, capsys) for name, command in COMMANDS.items()}
    assert len(planned) == 1
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    made = {name: shown(command, capsys) for name, command in COMMANDS.items()}
    assert len(planned) == 1 + len(COMMANDS)
    assert kept == made


def test_no_later_command_plans(planned: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    first = shown(COMMANDS["plan"], capsys)
    assert shown(COMMANDS["plan"], capsys) == first
    for name in ("explain", "explain --op", "report"):
        shown(COMMANDS[name], capsys)
    assert len(planned) == 1


def test_two_budgets_are_compared_without_planning(planned: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    command = ("diff", *STEP, "--against-budget-gb", "2")
    first = shown(command, capsys)
    assert shown(command, capsys) == first
    assert len(planned) == 2
    assert "+ is done only by the plan within 1 GB, - only by the plan within 2 GB" in " ".join(first[0].split())


@pytest.mark.parametrize("stage", ["scheduled", "forward"])
def test_a_stage_needs_the_graphs_and_is_planned_again(
    stage: str, planned: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shown(COMMANDS["plan"], capsys)
    assert main(("diff", *STEP, "--stage", stage)) == 0
    assert len(planned) == 2


@pytest.mark.parametrize("change", ["the model", "a module that it imports", "the budget", "the file is cut off"])
def test_what_changed_is_planned_again(
    change: str, planned: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(COMMANDS["plan"], capsys)
    command = COMMANDS["plan"]
    if change == "the model":
        Path("small.py").write_text(MODEL.replace("ReLU", "GELU"))
    elif change == "a module that it imports":
        Path("width.py").write_text("WIDTH = 64  # another file\n")
    elif change == "the budget":
        command = (*command[:-1], "2")
    else:
        (file,) = Path(os.environ["MEMOPT_CACHE_DIR"], "plans").iterdir()
        file.write_text(file.read_text()[:-200])
    first = shown(command, capsys)
    assert shown(command, capsys) == first
    assert len(planned) == 2
