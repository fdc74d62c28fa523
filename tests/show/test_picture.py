from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from memopt.planning.frontier import Frontier, Recipe
from memopt.show.frontier import as_svg, figure_of, named
from tests.planning.curves import made_up, solved

BEGINS = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}


@pytest.mark.parametrize("kind", BEGINS)
def test_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"curve{kind}"
    made_up().picture(path)
    assert path.read_bytes().startswith(BEGINS[kind])
    solved().picture(str(path))
    assert path.stat().st_size > 5_000


@pytest.mark.parametrize("name", ["curve.jpg", "curve", "png"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"a picture is a file named \*\.svg, \*\.png, \*\.pdf, not '{name}'"):
        made_up().picture(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_curve_is_drawn_in_its_colour(tmp_path: Path) -> None:
    made_up().picture(tmp_path / "curve.png")
    image = Image.open(tmp_path / "curve.png").convert("RGB")
    count = {color: times for times, color in image.getcolors(image.width * image.height)}
    assert count[0x1F, 0x5F, 0xA8] > 1_000
    assert count[0xC4, 0x53, 0x2D] > 200, "two dots and their label"
    assert count[0xEC, 0xEC, 0xEC] > 20_000, "where no schedule can be"


def texts(curve: Frontier) -> dict[str, Any]:
    """All texts of the picture, with their boxes in pixels."""
    figure: Any = figure_of(curve)
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()
    written = [*figure.texts, *axes.texts]
    return {text.get_text(): text.get_window_extent(renderer) for text in written if text.get_text()}


def test_texts() -> None:
    figure: Any = figure_of(made_up())
    assert set(texts(made_up())) == {
        "Llama[tiny] on h100",
        "what less memory costs a training step of 250 ms",
        "smallest: 2.000 GB",
        "nothing recomputed: 4.000 GB",
        "no schedule can be here",
        "memopt",
        "1, 2",
        "checkpoints every k blocks, k = 1, 2, …",
    }
    (axes,) = figure.axes
    assert axes.get_xlabel() == "peak memory of the training step, GB"
    assert axes.get_ylabel() == "added time, % of the step"


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.06, 0.15])
def test_no_two_texts_overlap(spread: float) -> None:
    recipes = tuple(Recipe(f"recipe {n}", 2.5 + spread * n, 0.3 + spread * (n % 3) / 3) for n in range(8))
    boxes = list(texts(replace(made_up(), recipes=recipes)).values())
    assert not [(a, b) for n, a in enumerate(boxes) for b in boxes[:n] if a.overlaps(b)]


def test_a_row_of_recipes_keeps_its_labels_near() -> None:
    every = [Recipe(f"every {k} blocks", 2.1 + 0.04 * k, 0.45) for k in range(2, 20)]
    boxes = texts(replace(made_up(), recipes=tuple(every)))
    assert {str(k) for k in range(2, 20)} <= boxes.keys()
    values = list(boxes.values())
    assert not [(a, b) for n, a in enumerate(values) for b in values[:n] if a.overlaps(b)]


def test_a_curve_of_one_point() -> None:
    only = replace(made_up(), points=made_up().points[-1:], smallest_gb=4.0, recipes=made_up().recipes[:1])
    assert "memopt" in texts(only)


def test_a_low_bound_is_named_beside_it() -> None:
    low = tuple(replace(point, bound=point.bound / 100) for point in made_up().points)
    assert "no schedule below" in texts(replace(made_up(), points=low))


def test_names() -> None:
    names = ("every 12 blocks", "sqrt(L) segments", "every 2 blocks", "attention only", "per block")
    recipes = [Recipe(name, 1.0, 0.1) for name in names]
    assert named(recipes) == "1, 2, 12, attention only, √L"
    assert named(recipes[1:2]) == "√L"


def test_notebooks() -> None:
    svg = as_svg(made_up())
    assert svg is not None
    assert svg.startswith("<?xml")
    assert made_up()._repr_svg_() is not None


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"not installed; pip install 'memopt\[picture\]'"):
        made_up().picture(tmp_path / "curve.png")
    assert as_svg(made_up()) is None
