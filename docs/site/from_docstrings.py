"""Pages that are made of docstrings: the passes one by one, and the API."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap

import memopt
import memopt.solver
import passes

_BASES = ("Pass", "Pipeline", "RewritePattern")
_GRAPHS = re.compile(r"^(Before|After[^\n]*):\n((?:[ \t]+\S.*\n?)+)", re.MULTILINE)


def passes_page() -> str:
    """Each pass with its docstring, in which graphs before and after become code."""
    lines = [
        "# The passes one by one",
        "Made of the docstrings in `passes/`. A pass takes a graph and returns another one; it applies a decision and "
        "makes none. How to write one: [Write a pass](passes.md).",
    ]
    for name in passes.__all__:
        one = getattr(passes, name)
        if inspect.isclass(one) and issubclass(one, passes.Pass) and name not in _BASES:
            file = inspect.getsourcefile(one) or ""
            lines += [
                f"## {name}",
                f"`passes/{file.rpartition('/passes/')[2]}`",
                as_markdown(inspect.getdoc(one) or ""),
            ]
    return "\n\n".join(lines) + "\n"


def as_markdown(docstring: str) -> str:
    """A docstring with its graphs, which are indented, as blocks of code."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}:\n\n```text\n{textwrap.dedent(found[2]).rstrip()}\n```\n\n"

    return _GRAPHS.sub(block, docstring + "\n").strip()


def api_page() -> str:
    """Every public name, in the order of use."""
    parts = [
        "# API",
        "Every public name, from the docstrings. Examples are on the pages about each subject.",
        "## memopt",
        *(_directive("memopt", name) for name in memopt.__all__ if not name.startswith("__")),
        "## Passes",
        *(_directive("passes", name) for name in _BASES),
        "## memopt.solver",
        *(_directive("memopt.solver", name) for name in memopt.solver.__all__),
    ]
    return "\n\n".join(parts) + "\n"


def members() -> list[str]:
    """The public methods of memopt's public classes, as "Class.method"."""
    classes = [value for value in (getattr(memopt, name) for name in memopt.__all__) if inspect.isclass(value)]
    return [
        f"{one.__name__}.{name}"
        for one in classes
        for name, value in inspect.getmembers(one, inspect.isfunction)
        if not name.startswith("_") and value.__module__.startswith("memopt.")
    ]


def _directive(package: str, name: str) -> str:
    """mkdocstrings' directive for a name, by the module that defines it."""
    value = getattr(importlib.import_module(package), name)
    home = getattr(memopt, "_MODULES", {}).get(name) if package == "memopt" else getattr(value, "__module__", package)
    home = getattr(value, "__module__", None) if str(getattr(value, "__module__", "")).startswith("memopt.") else home
    if package != "memopt" and not str(home).startswith(("memopt", "passes")):
        home = package
    return f"::: {home}.{name}"
