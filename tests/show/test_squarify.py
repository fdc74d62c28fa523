from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memopt.show.pictures import squarify

AREAS = st.lists(st.floats(1, 1e6), min_size=1, max_size=30).map(lambda areas: sorted(areas, reverse=True))


@given(AREAS)
def test_boxes_have_their_areas_and_fill_the_box(areas: list[float]) -> None:
    boxes = squarify(areas, (10.0, 20.0, 300.0, 200.0))
    whole = sum(areas)
    for area, (x, y, width, height) in zip(areas, boxes, strict=True):
        assert abs(width * height - 60_000 * area / whole) < 1e-3
        assert x >= 10 - 1e-6
        assert y >= 20 - 1e-6
        assert x + width <= 310 + 1e-3
        assert y + height <= 220 + 1e-3


@given(AREAS)
def test_no_two_boxes_overlap(areas: list[float]) -> None:
    boxes = squarify(areas, (0.0, 0.0, 300.0, 200.0))
    for number, (x, y, width, height) in enumerate(boxes):
        for a, b, across, up in boxes[:number]:
            common = min(x + width, a + across) - max(x, a), min(y + height, b + up) - max(y, b)
            assert min(common) < 1e-6 * 300


def test_equal_areas_are_nearly_square() -> None:
    for _, _, width, height in squarify([1.0] * 6, (0.0, 0.0, 300.0, 200.0)):
        assert abs(width - height) < 1e-9


def test_nothing() -> None:
    assert squarify([], (0.0, 0.0, 1.0, 1.0)) == []
