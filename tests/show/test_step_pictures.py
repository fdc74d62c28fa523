"""The pictures of a step with matplotlib: what they draw, and where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from memopt.errors import GIB
from memopt.planning.plan import Plan
from memopt.show.bands import COLOURS, band_of, bands, columns, edges
from memopt.show.page import _asset
from memopt.show.step import step_of
from memopt.units import size
from tests.planning.test_plan_networkx import PLANS, gpt2


@pytest.mark.parametrize("name", PLANS)
def test_columns_show_the_peak(name: str) -> None:
    step = step_of(PLANS[name]())
    for memory in (step.plain, step.planned):
        moments = columns(memory, 50, edges(memory)[-1])
        assert None not in moments
        drawn = bands(memory, moments)
        tops = [sum(values) for values in zip(*drawn.values(), strict=True)]
        assert max(tops) == memory.peak_bytes
        assert tops[-1] == memory.live_bytes[-1]


def test_the_timeline_is_of_both_schedules() -> None:
    plan = gpt2()
    (axes,) = plan.plot_timeline().axes
    top = max(float(one.get_paths()[0].vertices[:, 1].max()) for one in axes.collections)
    assert top * 1024**2 == pytest.approx(plan.predicted_peak_bytes)
    line = next(one for one in axes.lines if one.get_label() == "nothing recomputed")
    assert max(line.get_ydata()) * 1024**2 == pytest.approx(plan.plain.peak_bytes)
    budget = next(one for one in axes.lines if one.get_label() == "budget")
    assert budget.get_ydata()[0] * 1024**2 == pytest.approx(plan.budget_bytes)
    assert plan.plain.peak_bytes < GIB, "in MB"
    assert axes.get_ylabel() == "memory, MB"


@pytest.mark.parametrize("planned", [True, False])
def test_the_treemap_s_areas_are_bytes(planned: bool) -> None:
    plan = gpt2()
    figure: Any = plan.plot_treemap(planned=planned)
    (axes,) = figure.axes
    names = {colour: [band for band, own in COLOURS.items() if own == colour] for colour in COLOURS.values()}
    boxes = [(one, names.get(_hex(one.get_facecolor()), [])) for one in axes.patches]
    state = sum(one.get_width() * one.get_height() for one, bands in boxes if "optimizer state" in bands)
    rows = dict((plan.planned if planned else plan.plain).rows)
    peak = sum(rows.values())
    # The labels of modules take some of the area.
    assert 0.6 < state / (1000 * 520) / (rows["optimizer state"] / peak) < 1.4
    told = " ".join(text.get_text() for text in figure.texts)
    assert size(peak) in told
    assert ("as planned" in told) == planned
    assert "transformer" in " ".join(text.get_text() for text in axes.texts)


def _hex(colour: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour[:3])


@pytest.mark.parametrize("kind", [".svg", ".png", ".pdf"])
def test_files(kind: str, tmp_path: Path) -> None:
    plan = gpt2()
    plan.plot_timeline(tmp_path / f"timeline{kind}")
    plan.plot_treemap(str(tmp_path / f"treemap{kind}"))
    assert all(path.stat().st_size > 5_000 for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"a picture is a file named \*\.svg, \*\.png, \*\.pdf, not 'treemap\.jpg'"):
        plan.plot_treemap(tmp_path / "treemap.jpg")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"not installed; pip install 'memopt\[picture\]'"):
        gpt2().plot_timeline()


def test_the_page_has_the_colours_of_the_pictures() -> None:
    style = _asset("page.css")
    assert all(f"light-dark({colour}," in style for colour in COLOURS.values())
    assert band_of("reserve") == "other rows"


def test_notebooks(tmp_path: Path) -> None:
    plan = gpt2()
    text = plan._repr_html_()
    assert f"peak {size(plan.predicted_peak_bytes)}" in text
    assert text.count("<path") > 4
    assert len(text) < 40_000
    assert "<script" not in text
    plan.save(tmp_path / "plan.json")
    assert "<svg" not in Plan.load(tmp_path / "plan.json")._repr_html_()
