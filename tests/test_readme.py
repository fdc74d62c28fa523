"""README and docs are true: README's program runs and prints its plan, links and commands exist, results are measured.

`EXPECTTEST_ACCEPT=1` writes the plan that is printed into README in place of the one that is there.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memopt

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language; "" for those without."""
    return [text for named, text in BLOCK.findall(page.read_text(encoding="utf-8")) if named == language]


def in_order(wanted: list[str], lines: list[str]) -> bool:
    """Whether the lines that are wanted are among `lines`, in their order."""
    remaining = iter(lines)
    return all(any(line == found for found in remaining) for line in wanted)


def shown(printed: list[str]) -> list[str]:
    """Return the lines of a printed plan that README shows: its headline, and the table of its levers."""
    end = next(number for number, line in enumerate(printed) if line.startswith("┏")) - 1
    start = next(number for number, line in enumerate(printed) if line.startswith("Levers in use"))
    length = next(number for number, line in enumerate(printed[start:]) if line.startswith("└"))
    return [*printed[:end], *printed[start : start + length + 1]]


@pytest.mark.slow
def test_the_program_of_the_readme_prints_its_plan() -> None:
    """In a process of its own with one thread, for which the plan in README was made."""
    program = blocks(README, "python")[0]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, env=surroundings, cwd=ROOT
    )
    printed = done.stdout.splitlines()
    plan = next(text for text in blocks(README, "") if text.startswith("GPT2LMHeadModel"))
    if os.environ.get("EXPECTTEST_ACCEPT"):
        new = "\n".join(shown(printed)) + "\n"
        README.write_text(README.read_text(encoding="utf-8").replace(plan, new), encoding="utf-8")
        return
    assert in_order(plan.splitlines(), printed), f"README shows another plan than this one:\n{done.stdout}"


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        if path.startswith("http"):
            continue
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_can_be_read_and_commands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for program in blocks(page, "python"):
        ast.parse(program)
        for name in re.findall(r"\bmemopt\.(\w+)", program):
            assert hasattr(memopt, name), f"{page.name} uses memopt.{name}"
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), f"{page.name} names benchmarks.{name}"
    for path in re.findall(r"`((?:benchmarks|examples|tests|memopt|passes|docs)/[\w./]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for name in re.findall(r"`make ([\w-]+)", text) + re.findall(
        r"^make ([\w-]+)", "\n".join(blocks(page, "")), re.MULTILINE
    ):
        assert name in targets, f"{page.name} names make {name}"


def test_every_lever_has_its_row() -> None:
    """The tables of docs/levers.md are those of `memopt.LEVERS`; `EXPECTTEST_ACCEPT=1` writes them there."""
    page = ROOT / "docs" / "levers.md"
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^\| lever .*\n(?:\|.*\n)*", text, re.MULTILINE)
    made = [table_of([lever for lever in memopt.LEVERS.values() if lever.default is on]) for on in (True, False)]
    if os.environ.get("EXPECTTEST_ACCEPT"):
        for old, new in zip(found, made, strict=True):
            text = text.replace(old, new)
        page.write_text(text, encoding="utf-8")
        return
    assert found == made, "docs/levers.md has other rows than memopt.LEVERS: run this test with EXPECTTEST_ACCEPT=1"


def table_of(levers: list[Any]) -> str:
    head = "| lever | what it does | exactness | price | tried by |\n|---|---|---|---|---|\n"
    rows = ((f'`"{one.name}"`', one.what, one.exactness, one.price, one.tried_by) for one in levers)
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_glossary_is_short() -> None:
    terms = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(terms)) == len(terms) <= 30


def test_the_results_page_is_made_of_the_result_files() -> None:
    command = [sys.executable, "-m", "benchmarks.report", "--check"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def matrix() -> dict[str, Any]:
    """The names in benchmarks/matrix.py; tests do not import benchmarks."""
    return runpy.run_path(str(ROOT / "benchmarks" / "matrix.py"))


def test_the_public_ci_runs_the_pairs_of_the_matrix() -> None:
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    for name, versions in (("python", matrix()["PYTHONS"]), ("torch", matrix()["TORCHES"])):
        (listed,) = re.findall(rf"^        {name}: \[(.*)\]$", workflow, re.MULTILINE)
        assert tuple(ast.literal_eval(f"[{listed}]")) == versions


def test_counts_are_read_from_what_pytest_prints() -> None:
    printed = (
        "FAILED tests/test_units.py::test_one - assert 1 == 2\n= 1 failed, 39 passed, 3 skipped, 2 warnings in 7.03s ="
    )
    assert matrix()["counted"](printed) == {
        "failed": 1,
        "passed": 39,
        "skipped": 3,
        "not_passed": ["tests/test_units.py::test_one"],
    }


def test_result_files_are_small_and_say_where_they_were_measured() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*"))
    texts = [file.read_text(encoding="utf-8") for file in files]
    assert sum(len(text.splitlines()) for text in texts) < 3000
    for file, text in zip(files, texts, strict=True):
        for key in ("machine", "date", "command"):
            assert f'"{key}": ' in text, f"{file.name} has no {key}"
