from __future__ import annotations

import pytest

from memopt.show.drawing import _Room

INSIDE = (0.0, 0.0, 400.0, 300.0)
SIZE = (60.0, 12.0)


def test_the_nearest_place_above_comes_first() -> None:
    box, distance = _Room(INSIDE, [(100.0, 100.0)]).best((100.0, 100.0), *SIZE)
    assert box[0] + box[2] == pytest.approx(2 * 100)
    assert box[1] > 100
    assert distance < 1


@pytest.mark.parametrize("corner", [(0.0, 0.0), (400.0, 0.0), (0.0, 300.0), (400.0, 300.0)])
def test_labels_stay_inside(corner: tuple[float, float]) -> None:
    box, _ = _Room(INSIDE, [corner]).best(corner, *SIZE)
    assert box[0] >= 0
    assert box[1] >= 0
    assert box[2] <= 400
    assert box[3] <= 300


def test_labels_avoid_what_is_drawn() -> None:
    wall = (0.0, 90.0, 400.0, 300.0)
    box, _ = _Room(INSIDE, [(100.0, 85.0)], drawn=[wall]).best((100.0, 85.0), *SIZE)
    assert box[3] <= 90


def test_a_label_beside_another_point_gets_a_line() -> None:
    near, other = (100.0, 100.0), (112.0, 106.0)
    box, distance = _Room(INSIDE, [near, other]).best(near, *SIZE)
    assert box[2] < near[0] or box[3] < near[1] or distance > 1.5


def test_no_line_crosses_a_label() -> None:
    point = (200.0, 150.0)
    around = [(120.0, 160.0, 280.0, 172.0), (120.0, 120.0, 280.0, 140.0), (205.0, 140.0, 280.0, 160.0)]
    box, _ = _Room(INSIDE, [point], written=[*around, (120.0, 140.0, 195.0, 145.0)]).best(point, *SIZE)
    assert box[2] < 195, "the gap on the left is the only way out"


def test_no_line_crosses_another_point() -> None:
    point, other = (200.0, 150.0), (240.0, 150.0)
    above_and_below = [(0.0, 158.0, 400.0, 300.0), (0.0, 0.0, 400.0, 142.0)]
    walls = [*above_and_below, (0.0, 142.0, 45.0, 158.0), (115.0, 142.0, 260.0, 158.0), (330.0, 142.0, 400.0, 158.0)]
    near, _ = _Room(INSIDE, [point], drawn=walls).best(point, *SIZE)
    assert near[0] > 260, "the nearer of two gaps"
    far, _ = _Room(INSIDE, [point, other], drawn=walls).best(point, *SIZE)
    assert far[2] < 115, "the one that the other point does not bar"


def test_where_nothing_is_free_the_least_is_covered() -> None:
    box, _ = _Room(INSIDE, [(100.0, 100.0)], drawn=[INSIDE]).best((100.0, 100.0), *SIZE)
    assert box[2] - box[0] == pytest.approx(60)
