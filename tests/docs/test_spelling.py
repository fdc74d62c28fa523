"""Users read "optimizer", as torch and memopt's names spell it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def texts() -> Iterator[tuple[str, str]]:
    """Pages, and the strings of the programs that are no docstrings: messages, notes, help, figures."""
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("memopt/show/assets/*")):
        yield str(page), page.read_text(encoding="utf-8")
    for file in (path for folder in ("memopt", "passes", "examples") for path in ROOT.glob(f"{folder}/**/*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield f"{file}:{node.lineno}", node.value


def test_one_spelling() -> None:
    assert [place for place, text in texts() if "optimiser" in text.lower()] == []
