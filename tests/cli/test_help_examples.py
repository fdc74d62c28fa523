"""Every command in the help texts, README and docs runs as it is printed, and fits."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from memopt.cli.commands import memopt
from memopt.cli.main import main
from tests.docs.page_examples import PAGES, commands, commands_of

# Of the examples that plan a whole model, those that `make test` runs; it reads the options of all.
QUICK = (
    "plan torch.nn:TransformerEncoderLayer",
    "check gpt2",
)
PLANS = ("plan", "explain", "diff", "frontier", "max-batch", "max-length", "report", "export", "lock", "check")


def in_help(command: str) -> list[str]:
    """Return the examples of a subcommand's help text."""
    return commands(memopt.commands[command].help or "")


def every_example() -> list[Any]:
    """Return all examples as parameters; the ones that take long are marked so."""
    found = dict.fromkeys(
        [
            *(one for command in memopt.commands for one in in_help(command)),
            *commands(memopt.help or ""),
            *(one for page in PAGES for one in commands_of(page)),
        ]
    )
    slow = {one for one in found if one.startswith(PLANS) and not one.startswith(QUICK)}
    return [pytest.param(one, marks=[pytest.mark.slow] * (one in slow), id=one) for one in found]


@pytest.mark.parametrize("command", memopt.commands)
def test_every_help_text_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_help(command)
    assert main([command, "--help"]) == 0
    help_text = capsys.readouterr().out.partition("Options:")[0]
    assert f"memopt {command}" in help_text
    assert "\\b" not in help_text
    lines = help_text.splitlines()
    begins = next(number for number, line in enumerate(lines) if line.strip() in ("Example:", "Examples:"))
    assert lines[begins + 1].startswith("    memopt ")


def test_the_options_of_every_example_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each subcommand takes the arguments of its examples as they are printed; nothing is planned."""
    monkeypatch.chdir(tmp_path)
    for example in every_example():
        name, *arguments = shlex.split(example.values[0])
        memopt.commands[name].make_context(name, arguments)


@pytest.mark.parametrize("example", every_example())
def test_it_runs(
    example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(example)) == 0
    printed = capsys.readouterr().out
    assert printed.strip()
    if "--json" in example:
        json.loads(printed)
