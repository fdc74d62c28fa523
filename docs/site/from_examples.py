"""The page of examples: each script and notebook of examples/, with what it says of itself and its code."""

from __future__ import annotations

import ast
import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "examples"
_HEAD = """# Examples

Whole programs, which a test runs at their small sizes: `python examples/NAME.py --small`. None downloads anything.
"""


def page() -> str:
    """One section for each program, notebooks last."""
    parts = [_HEAD]
    for file in sorted(FOLDER.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        about = ast.get_docstring(ast.parse(text)) or ""
        parts.append(f"## {file.name}\n\n{about}\n\n```python\n{_without_docstring(text).strip()}\n```\n")
    parts += [f"## {file.name}\n\n{_cells(file)}" for file in sorted(FOLDER.glob("*.ipynb"))]
    return "\n".join(parts)


def anchor(file: Path) -> str:
    """The anchor of a file's section."""
    return file.name.replace(".", "") if file.suffix in (".py", ".ipynb") and file.parent == FOLDER else ""


def _without_docstring(text: str) -> str:
    first = ast.parse(text).body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return "\n".join(text.splitlines()[first.end_lineno or 0 :]) if documented else text


def _cells(file: Path) -> str:
    parts = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{text}\n```\n")
        else:
            parts.append(text.lstrip("#").lstrip() if text.startswith("# ") else text)
    return "\n\n".join(parts) + "\n"
