"""A command that takes long says how far it has come: in one line on a terminal, in a line for each stage elsewhere."""

from __future__ import annotations

import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memopt import progress
from memopt.cli.main import main
from tests.marks import slow

ROOT = Path(__file__).parents[2]
SMALL = ("gpt2", "--set", "n_layer=1", "--set", "n_embd=32", "--set", "n_head=2", "--set", "vocab_size=128")
STEP = ("--shape", "input_ids=2x32", "--device", "h100", "--budget-gb", "6")


@pytest.fixture
def every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages leave a line however short they are, and none while they run, however long that takes."""
    monkeypatch.setattr(progress, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LOG_SECONDS", math.inf)


@pytest.mark.usefixtures("every_stage")
@pytest.mark.parametrize(
    ("command", "stages"),
    [
        ("plan", {"loading gpt2", "capturing", "tracing", "solving", "planning"}),
        slow("frontier", {"loading gpt2", "planning", "looking for the smallest budget"}),
        slow("max-batch", {"loading gpt2", "capturing", "planning", "looking for the largest size"}),
    ],
)
def test_elsewhere_one_line_a_stage(command: str, stages: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = {"frontier": ["--points", "3"], "max-batch": ["--at-most", "4"]}.get(command, [])
    assert main([command, *SMALL, *STEP, *more, "--json"]) == 0
    printed = capsys.readouterr()
    lines = [re.fullmatch(r"memopt: (.*) took [\d.]+ s", line) for line in printed.err.splitlines()]
    assert all(lines), printed.err
    assert stages <= {line[1] for line in lines if line}
    assert "took" not in printed.out


@pytest.mark.slow
def test_on_a_terminal_one_line() -> None:
    """Standard error is a pseudo-terminal, standard output a file."""
    script = "import sys; from memopt.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "plan", *SMALL, *STEP, "--json"]
    ours, theirs = pty.openpty()
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=surroundings)
    os.close(theirs)
    printed = read_all(ours)
    assert process.wait() == 0
    shown = re.findall(r"memopt: (.*?) *(?:\r|\n|\x1b|$)", printed)
    assert any(line.startswith("loading gpt2") for line in shown), printed
    assert any(re.match(r"planning(: .*)? · (capturing|tracing|solving)", line) for line in shown), printed
    assert printed.count("\x1b[?25l") == printed.count("\x1b[?25h"), "the cursor is hidden and shown again"


def test_what_a_model_prints_stays_on_standard_output(tmp_path: Path) -> None:
    """While the line is on the terminal, and standard output is a file."""
    script = "from memopt.progress import stage\nwith stage('planning'):\n    print('from the model')"
    ours, theirs = pty.openpty()
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=out, stderr=theirs, env=surroundings)
    os.close(theirs)
    printed = read_all(ours)
    assert process.wait() == 0
    assert "planning" in printed
    assert "from the model" not in printed
    assert (tmp_path / "out.txt").read_text() == "from the model\n"


def read_all(terminal: int) -> str:
    """Return what is written to a pseudo-terminal until its other end is closed."""
    parts: list[bytes] = []
    while True:
        try:
            parts.append(os.read(terminal, 65536))
        except OSError:  # how Linux reports the end
            break
        if not parts[-1]:
            break
    os.close(terminal)
    return b"".join(parts).decode()
