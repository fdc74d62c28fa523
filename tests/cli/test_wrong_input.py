"""Wrong input ends with one sentence on stderr and its exit code, and with a traceback only for `--debug`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memopt.cli.early import UsageError
from memopt.cli.main import main

ROOT = Path(__file__).parents[2]
SMALL = "import torch\nfrom torch import nn\n\ndef small(width=64):\n    return nn.Linear(width, 8)\n"
TWO = """from torch import nn

class Two(nn.Linear):
    def __init__(self, width=64):
        super().__init__(width, 8)

    def forward(self, left, right, scale=1.0):
        return super().forward(left + right)

def sized(width):
    return Two(width)
"""
STEP = ("--shape", "4x64", "--shape", "target=4:int64", "--loss", "cross_entropy", "--device", "cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in with files of models."""
    (tmp_path / "small.py").write_text(SMALL)
    (tmp_path / "broken.py").write_text("print('begins')\nraise RuntimeError('no such luck\\nand more')\n")
    (tmp_path / "syntax.py").write_text("def (:\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(7)\n")
    (tmp_path / "raises.py").write_text("def make():\n    raise KeyError('weights')\n")
    (tmp_path / "number.py").write_text("def make():\n    return 3\n")
    (tmp_path / "two.py").write_text(TWO)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "folder.html").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


WRONG = {
    ("gpt3",): "no model is named 'gpt3'; did you mean",
    ("nothinglikeit",): "name a model type of transformers",
    ("nothing-like-it",): "memopt downloads nothing: run hf download nothing-like-it config.json",
    ("no_such_package:make",): "there is no module 'no_such_package'",
    ("no_such_file.py:make",): "there is no file no_such_file.py",
    ("config.json",): "the configuration of config.json cannot be used",
    ("elsewhere/config.json",): "there is no file elsewhere/config.json",
    ("small.py:big", *STEP): "small.py:big has no 'big'; it defines small",
    ("broken.py:make", *STEP): "broken.py raised RuntimeError: no such luck when it was imported (line 2 of broken.py)",
    ("syntax.py:make", *STEP): "syntax.py raised SyntaxError",
    ("leaves.py:make", *STEP): "leaves.py raised SystemExit: 7",
    ("raises.py:make", *STEP): "raises.py:make raised KeyError: 'weights' when it was called",
    ("number.py:make", *STEP): "must return a torch.nn.Module, or a tuple of one and its inputs, not int",
    ("small.py:small", "--set", "height=3", *STEP): "unexpected keyword argument 'height'",
    ("small.py:small", "--shape", "input=4y64"): "--shape takes NAME=SIZES:DTYPE",
    ("small.py:small", "--shape", "input=4x0"): "a size of 0",
    ("small.py:small", "--shape", "input=4x64:int65"): "no dtype 'int65'",
    ("small.py:small", "--shape", "other=4x64"): "Linear takes no 'other'; its forward takes input",
    ("small.py:small", "--shape", "input=4x64", "--shape", "4x64"): "--shape: name all inputs or none",
    ("two.py:sized", *STEP): "two.py:sized needs 'width'; give it with --set width=VALUE",
    ("two.py:Two", "--shape", "left=4x64"): "the forward of Two also needs right; give --shape right=SIZES:DTYPE",
    ("two.py:Two", "--shape", "4x64"): "the forward of Two also needs right; give --shape once for each, in order",
    ("two.py:Two", *["--shape", "4x64"] * 4): "the forward of Two takes 3 inputs at most (left, right, scale), not 4",
    ("",): "MODEL is empty; name a model type of transformers",
    (":small",): "':small' names no file or module before the colon",
    ("small.py:small",): "give the shapes of the inputs of Linear",
    ("small.py:small", "--shape", "4x64", "--loss", "cross_entropy"): "--loss needs --shape target",
    ("small.py:small", *STEP[:-2], "--device", "rtx-9999"): "no card is named 'rtx-9999'",
    ("small.py:small", *STEP[:-2], "--device", "a100"): "may be a100-40 or a100-80",
    ("small.py:small", *STEP, "--budget-gb", "lots"): "--budget-gb takes a number of gigabytes",
    ("small.py:small", *STEP, "--budget-gb", "-3"): "--budget-gb takes a number of gigabytes",
    ("small.py:small", *STEP, "--allow", "magic"): "--allow has no lever 'magic'; known are default, recompute",
    ("small.py:small", *STEP, "--allow", "default,fpp8"): "--allow has no lever 'fpp8'; did you mean fp8?",
    ("small.py:small", *STEP, "--optimizer", "magic"): "torch.optim has no optimizer 'magic'",
    ("small.py:small", *STEP, "--precision", "magic"): "Invalid value for '--precision'",
    ("gpt2", "--set", "n_layr=2"): "has no 'n_layr'; did you mean 'n_layer'?",
    ("gpt2", "--set", "n_layer"): "--set takes NAME=VALUE",
    ("gpt2", "--set", "n_head=5"): "cannot be built from its configuration",
    ("gpt2", "--no-such-option"): "--no-such-option",
    (): "Missing argument 'MODEL'",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
@pytest.mark.usefixtures("folder")
def test_one_sentence_and_code_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in sentences(printed.err) if line != "begins"]
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("memopt: ")
    assert WRONG[arguments] in lines[0]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("report", "small.py:small", *STEP, "--to", "page.pdf"), "--to takes a file named *.html, not 'page.pdf'"),
        (("export", "small.py:small", *STEP, "--to", "step.txt"), "no format goes with the name 'step.txt'"),
        (("report", "small.py:small", *STEP, "--to", "folder.html"), "--to: folder.html is a folder"),
        (("plan", "small.py:small", *STEP, "--save", "folder.html"), "--save: folder.html is a folder"),
        (("plan", "small.py:small", *STEP, "--save", "/proc/plan.json"), "--save: nothing can be written in /proc"),
        (("frontier", "small.py:small", *STEP, "--save", "no/curve.json"), "--save: there is no folder no"),
        (("frontier", "small.py:small", *STEP, "--picture", "no/curve.svg"), "--picture: there is no folder no"),
        (("export", "small.py:small", *STEP), "Missing option '--to'"),
        (("export", "small.py:small", *STEP, "--to", "a.dot", "--format", "onnx"), "'onnx' is not one of"),
    ],
)
def test_files_that_cannot_be_written(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path.cwd().iterdir())
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.usefixtures("folder")
def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "small.py:small", *STEP, "--to", "nowhere/page.html"]) == 2
    assert capsys.readouterr().err == "memopt: --to: there is no folder nowhere\n"


OTHER = {
    ("explain", "--op", "nothing"): "no op is named 'nothing'",
    ("diff", "--stage", "nothing"): "no stage 'nothing' to show; give one of 'scheduled'",
    ("diff", "--against-budget-gb", "lots"): "--against-budget-gb takes a number of gigabytes",
    ("frontier", "--points", "1"): "points",
    ("frontier", "--points", "many"): "Invalid value for '--points'",
    ("frontier", "--points", "2", "--picture", "curve.txt"): "a picture is a file named *.svg, *.png, *.pdf",
    ("frontier", "--points", "2", "--save", "no_such_folder/curve.json"): "no_such_folder",
    ("plan", "--save", "no_such_folder/plan.json"): "no_such_folder",
    ("max-batch", "--at-most", "0"): "at_most",
    ("max-batch", "--multiple-of", "8", "--at-most", "4"): "at_most must be at least 8",
    ("max-length", "--at-most", "0"): "at_most",
    ("max-batch", "--max-added-time", "-1"): "max_added_time",
}


@pytest.mark.parametrize("arguments", OTHER, ids=" ".join)
@pytest.mark.usefixtures("folder")
def test_the_other_options(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    command, *options = arguments
    assert main([command, "small.py:small", *STEP, *options]) == 2
    printed = capsys.readouterr()
    assert len(sentences(printed.err)) == 1, printed.err
    assert OTHER[arguments] in sentences(printed.err)[0]
    assert "Traceback" not in printed.err


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plann"]) == 2
    assert "No such command" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_debug_raises() -> None:
    with pytest.raises(UsageError, match="no such luck") as raised:
        main(["plan", "broken.py:make", *STEP, "--debug"])
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.usefixtures("folder")
def test_a_step_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "small.py:small", *STEP, "--budget-gb", "0.00001"]
    assert main(arguments) == 3
    printed = capsys.readouterr()
    assert "a budget of 0.00001 GB is too small for this step: the smallest that works is" in " ".join(
        printed.err.split()
    )
    assert sentences(printed.err)[-1].startswith("missing: ")
    assert main([*arguments, "--json"]) == 3
    figures = json.loads(capsys.readouterr().out)
    assert figures["fits"] is False
    assert figures["smallest_gb"] > figures["budget_gb"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["plan", "explain", "diff", "frontier", "report", "max-batch", "check"])
def test_what_goes_wrong_is_json_too_for_scripts(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal has its figures, anything else the sentence that is on stderr; `frontier` has no budget to refuse."""
    if command != "frontier":
        assert main([command, "small.py:small", *STEP, "--budget-gb", "0.00001", "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main([command, "small.py:big", *STEP, "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": printed.err.removeprefix("memopt: ").strip(), "exit_code": 2}


@pytest.mark.usefixtures("folder")
def test_a_shape_that_the_forward_cannot_take(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "small.py:small", "--shape", "4x65", *STEP[2:]]
    assert main(arguments) == 1
    error = capfd.readouterr().err
    assert len(sentences(error)) == 1, error
    assert "[4, 65]" in error
    assert "--shape" in error
    assert "allow" not in error


@pytest.mark.slow
def test_an_interrupt_in_the_middle(folder: Path) -> None:
    """Once while the file is imported, that is before anything of torch is, once while the step is planned."""
    (folder / "slow.py").write_text(f"import time\nprint('imported', flush=True)\ntime.sleep(30)\n{SMALL}")
    assert interrupted(folder, "slow.py:small") == (-signal.SIGINT, ["imported", "memopt: interrupted"])
    forward = SMALL + "\nclass Slow(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"
    (folder / "later.py").write_text(
        forward + "\ndef small():\n    print('imported', flush=True)\n    return nn.Sequential(*[Slow(64, 64)] * 300)\n"
    )
    assert interrupted(folder, "later.py:small", wait=1.5) == (-signal.SIGINT, ["imported", "memopt: interrupted"])


def interrupted(folder: Path, model: str, wait: float = 0.0) -> tuple[int, list[str]]:
    """Send Ctrl-C to a `memopt plan` after its model's file has printed a line, and return exit code and stderr."""
    command = [sys.executable, "-m", "memopt", "plan", model, *STEP]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=folder, env=surroundings, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    first = process.stderr.readline()
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    return process.wait(), sentences(first + rest)


def sentences(printed: str) -> list[str]:
    """Return the lines of stderr, without those that say how long a stage took."""
    return [line for line in printed.splitlines() if line and not re.search(r" took [\d.]+ s$", line)]
