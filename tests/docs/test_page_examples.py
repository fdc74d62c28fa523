"""Every example of README and docs runs as it is printed, and every public name has one."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import sys
from functools import cached_property
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import memopt
import memopt.solver
from tests.docs.page_examples import NOT_RUN, PAGES, ROOT, given, marked_blocks, python_blocks
from tests.elsewhere import counted  # noqa: F401, a fixture
from tests.marks import slow

WITH_PYTHON = [page for page in PAGES if python_blocks(page)]
# README's program runs in a process of its own in tests/test_readme.py, as those of docs/integrations do in
# tests/integrations.
HERE = [page for page in WITH_PYTHON if page.name != "README.md" and page.parent.name != "integrations"]
LONG = {
    *(
        "budget.md",
        "checks.md",
        "cluster.md",
        "frontier.md",
        "levers.md",
        "outputs.md",
        "page.md",
        "passes.md",
        "plan.md",
    ),
    *("precision.md", "sizes.md", "start.md"),
}
"""The pages whose programs take seconds to minutes: `make pages` runs them."""
MEMBERS = (FunctionType, property, cached_property, classmethod, staticmethod)
FOR_OUR_OWN_LAYERS = {"BudgetError.adding", "Plan.solved"}
"""Members that pass values between memopt's own layers."""
BASES = ("Pass", "Pipeline", "RewritePattern")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [slow(page) if page.name in LONG else page for page in HERE], ids=name_of)
@pytest.mark.usefixtures("counted")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")  # what a dataclass looks for
    monkeypatch.setitem(sys.modules, "page", module)
    vars(module).update(given())
    for number, block in enumerate(python_blocks(page)):
        file = f"{name_of(page)}, block {number}"
        linecache.cache[file] = len(block), None, block.splitlines(keepends=True), file  # for tracebacks, and Dynamo
        exec(compile(block, file, "exec", dont_inherit=True), vars(module))


def test_what_is_not_run_says_why() -> None:
    marked = {name_of(page): marked_blocks(page) for page in PAGES if marked_blocks(page)}
    for page, blocks in marked.items():
        for block in blocks:
            ast.parse(block)
            assert len(block.splitlines()[0]) > len(NOT_RUN) + 10, f"{page} does not say why a block is not run"
    assert sum(map(len, marked.values())) <= 3, marked


def names_used(text: str) -> set[str]:
    """Return the last parts of all names in a program."""
    return set(re.findall(r"\b([A-Za-z_]\w*)\b", text))


def public_names() -> list[str]:
    return sorted({*memopt.__all__, *memopt.solver.__all__, *BASES} - {"__version__"})


USED = names_used("\n".join(block for page in WITH_PYTHON for block in python_blocks(page)))


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_an_example_that_runs(name: str) -> None:
    assert name in USED, f"no example in README or docs uses {name}"


def public_members() -> list[str]:
    """Return the public methods and properties of memopt's public classes, as "Class.member"."""
    classes = [value for value in (getattr(memopt, name) for name in memopt.__all__) if inspect.isclass(value)]
    return [
        f"{one.__name__}.{member}"
        for one in classes
        for member in dir(one)
        if not member.startswith("_")
        and isinstance(inspect.getattr_static(one, member), MEMBERS)
        and defined_by_memopt(one, member)
    ]


def defined_by_memopt(one: type, member: str) -> bool:
    home = next(base for base in one.__mro__ if member in vars(base))
    return home.__module__.partition(".")[0] == "memopt"


@pytest.mark.parametrize("member", sorted({*public_members()} - FOR_OUR_OWN_LAYERS))
def test_every_public_member_has_an_example_that_runs(member: str) -> None:
    assert member.partition(".")[2] in USED, f"no example in README or docs uses {member}"


def test_the_examples_in_docstrings_are_doctests_that_run() -> None:
    """There are none at present, since the examples are in docs; whoever writes one has it run here."""
    values = [getattr(memopt, name) for name in memopt.__all__]
    assert not [value for value in values if ">>>" in (inspect.getdoc(value) or "")]
