"""Tests, benchmarks and examples: which of them may import which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {"tests": {"benchmarks"}, "benchmarks": {"tests"}, "examples": {"tests", "benchmarks"}}


def imported(file: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_of(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = {str(file.relative_to(ROOT)): imported(file) & FORBIDDEN[folder] for file in files}
    assert not {file: names for file, names in wrong.items() if names}
