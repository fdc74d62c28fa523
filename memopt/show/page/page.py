"""Puts a page together: one file of HTML that needs no other, and no network."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from memopt.show.page.data import PageFigures, as_json

_SCRIPTS = (
    "text", "state", "data", "moments", "theme", "summary", "axes", "timeline", "tensors", "pointing", "squarify",
    "treemap", "frontier", "types", "diff", "story", "operators", "search", "start",
)  # fmt: skip
"""The scripts in the order in which they stand in the page. All of them are defined before `start` runs."""


def write_page(path: Path, figures: PageFigures) -> None:
    """Write the page to a file. Raises `ValueError` for a name that is not of an HTML file, and `OSError`."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the page is a file named *.html, not {path.name!r}")
    path.write_text(page(figures), encoding="utf-8")


def page(figures: PageFigures) -> str:
    """The page as text."""
    scripts = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    parts = {
        "title": escape(f"{figures.plan.model} on {figures.plan.hardware}: memopt"),
        "style": page_style(),
        "figures": as_json(figures),
        "script": f'"use strict";\n(() => {{\n{scripts}\n}})();',
    }
    text = _asset("page.html")
    before, *marked = text.split("{{")
    filled = (parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in marked))
    return before + "".join(filled)


def page_style() -> str:
    """The page's style sheet."""
    return _asset("page.css")


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
