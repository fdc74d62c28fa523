"""Runs the notebooks of examples/ and keeps their outputs in them, as Jupyter would.

    python -m benchmarks.notebooks [NOTEBOOK ...]

Each runs in a process of its own with one thread, from its first cell to its last. Of an object in the last line of a
cell its HTML or SVG is kept, as Jupyter shows it, and its text; of all else what is printed. Lines on stderr are left
out.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

FOLDER = Path(__file__).resolve().parent.parent / "examples"
RICH = (("text/html", "_repr_html_"), ("image/svg+xml", "_repr_svg_"))


def outputs_of(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run one cell among the `names` of those before it; returns its outputs in the format of notebooks."""
    tree = ast.parse(source)
    shows = isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";")
    last = tree.body.pop() if shows else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    found: list[dict[str, Any]] = []
    if text := printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        shown = {kind: getattr(value, name)() for kind, name in RICH if hasattr(value, name)}
        data = {kind: text.splitlines(keepends=True) for kind, text in shown.items() if text}
        data["text/plain"] = (str(value) if data else repr(value)).splitlines(keepends=True)
        found.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return found


def run(notebook: Path) -> None:
    """Run a notebook, and write it with its outputs."""
    content, names = json.loads(notebook.read_text(encoding="utf-8")), {"__name__": "__main__"}
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "memopt"}
    )  # text as text, equal names each time
    for number, cell in enumerate(cells, 1):
        cell["outputs"] = outputs_of("".join(cell["source"]), names, number)
        cell["execution_count"] = number
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        run(Path(sys.argv[2]))
        return
    for notebook in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(FOLDER.glob("*.ipynb")):
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "MEMOPT_CACHE": "0"}
        command = [sys.executable, "-m", "benchmarks.notebooks", "--here", str(notebook)]
        subprocess.run(command, check=True, env=surroundings)
        print(f"{notebook.name}: {notebook.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
