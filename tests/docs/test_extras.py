"""Whoever is told to install an extra finds it in pyproject.toml."""

from __future__ import annotations

import re

from tests.docs.page_examples import PAGES, ROOT


def test_every_extra_that_is_named_is_there() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    files = [*PAGES, ROOT / "Makefile", *(ROOT / "memopt").rglob("*.py"), *(ROOT / "examples").rglob("*.*")]
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files if file.is_file())
    named = {extra for text in texts for extra in re.findall(r"(?:memopt|(?<!\w)\.)\[(\w+)\]['\"`]", text)}
    assert {"transformers", "picture", "dev"} <= named
    assert named <= extras
