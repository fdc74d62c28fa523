"""Tests, benchmarks and examples: which of them may import which."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {"tests": {"benchmarks"}, "benchmarks": {"tests"}, "examples": {"tests", "benchmarks"}}


def imported(file: Path) -> set[str]:
    """Return the modules that a file imports or may import, wherever in it: of `from a import b` also "a.b"."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return (
        names | {str(node.module) for node in found} | {f"{n.module}.{alias.name}" for n in found for alias in n.names}
    )


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_of(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = {
        str(file.relative_to(ROOT)): {name.partition(".")[0] for name in imported(file)} & FORBIDDEN[folder]
        for file in files
    }
    assert not {file: names for file, names in wrong.items() if names}


def test_no_circles_among_benchmarks() -> None:
    """Those of the packages are held by import-linter."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in (ROOT / "benchmarks").rglob("*.py")
    }
    imports = {name: imported(file) & set(files) - {name} for name, file in files.items()}
    assert imports["benchmarks.report"]
    list(TopologicalSorter(imports).static_order())  # raises CycleError
