"""The page as a file: it needs no other, data cannot become markup, and the package holds what it is made of."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from memopt.planning.changes import RECOMPUTED, Change
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import PlanDiff, StageDiff
from memopt.show import page as page_module
from memopt.show.page import page, short_source
from memopt.show.step import Step, StepMemory, _Evaluation, _LiveRange, _StepOp
from tests.planning.test_plan_networkx import PLANS, gpt2
from tests.show.small import SmallCurve, SmallPlan

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "memopt" / "show" / "assets"
HOSTILE = '</script><img src=x onerror="fetch(1)"><!--'


def figures_of(text: str) -> dict[str, Any]:
    """The figures in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    figures: dict[str, Any] = json.loads(found.group(1))
    return figures


def small_step(name: str) -> Step:
    ops = (_StepOp(name, name, "forward", name, "saved", name, f"{name}:1", name, 4, 0.1),)
    memory = StepMemory({"parameters": 8}, (_Evaluation(0, 0.0),), 1, (_LiveRange(0, 4, "outputs", 0, 0),), {}, 0.1)
    return Step(ops, memory, memory)


def test_it_needs_no_other_file(tmp_path: Path) -> None:
    gpt2().report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    without_figures = text.replace(re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)[0], "")
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:,)""", without_figures)
    assert set(re.findall(r"https?://[^\s\"'`)]+", without_figures)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert "{{" not in without_figures


def test_figures_cannot_become_markup() -> None:
    change = Change(RECOMPUTED, HOSTILE, HOSTILE, HOSTILE, reason=HOSTILE, code=HOSTILE, source=f"{HOSTILE}:1")
    diff = PlanDiff(HOSTILE, (change,), (HOSTILE,), lambda stage: StageDiff(()))
    plan = replace(SmallPlan(), model=HOSTILE, notes=(HOSTILE,))
    text = page(plan, small_step(HOSTILE), diff, (), SmallCurve())
    assert HOSTILE not in text
    assert text.count("</script>") == 2
    figures = figures_of(text)
    assert figures["plan"]["model"] == HOSTILE
    assert HOSTILE in figures["texts"]


def test_its_scripts_write_no_markup() -> None:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in ASSETS.glob("*.js")}
    for name, text in scripts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name


def test_the_package_holds_all_of_it() -> None:
    names = {path.name for path in ASSETS.iterdir()}
    assert names == {"page.html", "page.css", *(f"{name}.js" for name in page_module._SCRIPTS)}
    assert {one.name for one in (files("memopt.show") / "assets").iterdir()} == names
    packaged = re.search(r"package-data\]\nmemopt = (\[.*?\])", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert packaged
    patterns = json.loads(packaged.group(1))
    assert names <= {path.name for pattern in patterns for path in (ROOT / "memopt").glob(pattern)}


@pytest.mark.parametrize("name", PLANS)
def test_the_drawn_peak_is_the_plan_s(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]()
    plan.report(tmp_path / "page.html")
    figures = figures_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert drawn_peak(figures, "planned") == figures["plan"]["planned"]["peak"] == plan.predicted_peak_bytes
    assert drawn_peak(figures, "plain") == figures["plan"]["plain"]["peak"] == plan.plain.peak_bytes


def drawn_peak(figures: dict[str, Any], which: str) -> int:
    """The highest point of the timeline, counted from the figures in the page."""
    memory = figures["step"][which]
    change = [0] * (len(memory["op"]) + 1)
    ranges = memory["ranges"]
    for nbytes, first, last in zip(ranges["bytes"], ranges["first"], ranges["last"], strict=True):
        change[first] += nbytes
        change[last + 1] -= nbytes
    workspace = dict(memory["workspace"])
    live, peak = sum(nbytes for _, nbytes in memory["resident"]), sum(nbytes for _, nbytes in memory["optimizer"])
    for moment, more in enumerate(change[:-1]):
        live += more
        peak = max(peak, live + workspace.get(moment, 0))
    return peak


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the page is a file named \*\.html, not 'page\.txt'"):
        gpt2().report(tmp_path / "page.txt")


def test_a_plan_from_a_file_has_no_step(tmp_path: Path) -> None:
    gpt2().save(tmp_path / "plan.json")
    Plan.load(tmp_path / "plan.json").report(tmp_path / "page.html")
    figures = figures_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert figures["step"] is None
    assert figures["plan"]["planned"]["rows"]


def test_sources_do_not_name_the_author_s_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_source(f"{tmp_path}/models/mine.py:3") == "models/mine.py:3"
    assert short_source("/home/me/.venv/lib/site-packages/transformers/gpt2.py:5") == "transformers/gpt2.py:5"
    assert short_source("") == ""
