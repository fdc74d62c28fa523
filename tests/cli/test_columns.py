"""What commands print in 80 and in 120 columns: no line is wider, and no table loses a figure."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from memopt.cli.main import main
from memopt.errors import GIB
from memopt.planning.plan import ReceiptRow
from tests.show.test_report import plan

GOLDEN = Path(__file__).parent / "golden"
SMALL = (
    "from torch import nn\n\ndef small():\n    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))\n"
)
TARGET = ("--shape", "target=512:int64", "--loss", "cross_entropy")
STEP = ("small.py:small", "--shape", "512x64", *TARGET, "--device", "cpu")
CUT = re.compile(r"\S… *[│┃]")
"""A cell of which the end is missing."""
WIDTHS = pytest.mark.parametrize("width", [80, 120])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.py").write_text(SMALL)
    rows = ReceiptRow("", 4 * GIB, 0.26), ReceiptRow("fused_ops", 3 * GIB, 0.25), ReceiptRow("recompute", 2 * GIB, 0.3)
    replace(plan(), levers=("fused_ops",), receipt=rows).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@WIDTHS
@pytest.mark.parametrize(
    "command",
    [
        ("plan", *STEP),
        ("explain", *STEP),
        ("explain", *STEP, "--op", "addmm"),
        ("diff", *STEP, "--precision", "bf16"),
        ("frontier", *STEP, "--points", "3", "--effort", "fast"),
        ("lock", *STEP),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("folder")
def test_no_figure_is_lost(
    command: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if CUT.search(line)]


@WIDTHS
@pytest.mark.usefixtures("folder")
def test_a_refusal_is_broken_between_words(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(("plan", *STEP, "--budget-gb", "0.0001", "--effort", "fast")) == 3
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= width
    first = next(number for number, line in enumerate(lines) if "a budget of 0.0001 GB is too small" in line)
    assert "the smallest that works is 0." in " ".join(lines[first : first + 2])
    assert any(line.startswith("missing: ") for line in lines[first:])


@WIDTHS
@pytest.mark.parametrize("command", ["cards", "explain plan.json"])
@pytest.mark.usefixtures("folder")
def test_goldens(command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(command.split()) == 0
    # Without the row of this machine.
    printed = "".join(line for line in capsys.readouterr().out.splitlines(True) if not line.startswith("│ cpu "))
    golden = GOLDEN / f"{command.replace(' ', '_').replace('.json', '')}_{width}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(printed, encoding="utf-8")
    assert printed == golden.read_text(encoding="utf-8")
    assert max(map(len, printed.splitlines())) <= width
    assert not CUT.search(printed)
