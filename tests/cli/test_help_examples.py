"""Every example of the help texts and of docs/command_line.md runs as it is printed, and fits."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from memopt.cli.commands import SUBCOMMANDS, memopt
from memopt.cli.main import main

ROOT = Path(__file__).parents[2]
# Examples that take longer than 15 seconds.
SLOW = ("plan gpt2 ", "plan vit ")


def examples(text: str) -> list[str]:
    """Return the commands of a text, one string each, their continued lines joined."""
    found: list[str] = re.findall(r"^ *memopt ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [re.sub(r"\s*\\\n\s*", " ", command) for command in found]


def in_help(command: str) -> list[str]:
    """Return the examples of a subcommand's help text."""
    return examples(import_module(f"memopt.cli.commands.{command.replace('-', '_')}").command.help)


def in_docs() -> list[str]:
    """Return the examples of the page about the command line."""
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    return examples("\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))


def every_example() -> list[object]:
    """Return all examples as parameters; the ones that take long are marked so."""
    found = dict.fromkeys(
        [*(one for command in SUBCOMMANDS for one in in_help(command)), *examples(memopt.help or ""), *in_docs()]
    )
    return [pytest.param(one, marks=[pytest.mark.slow] * one.startswith(SLOW), id=one) for one in found]


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_every_help_text_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_help(command)
    assert main([command, "--help"]) == 0
    assert f"memopt {command}" in capsys.readouterr().out.partition("Options:")[0]


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
