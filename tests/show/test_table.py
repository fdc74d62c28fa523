from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline

from memopt.planning.frontier import FrontierPoint
from memopt.show.frontier import render, spread
from tests.planning.curves import made_up, solved
from tests.show.small import IN_ASCII


def test_golden() -> None:
    assert_expected_inline(
        render(made_up()).translate(IN_ASCII),
        """\
Llama[tiny], planned for h100: from 4 GB with nothing recomputed down to 2 GB (no schedule that keeps the
order of operators holds less than 1.5 GB), added time as a share of 250 ms
The least added time for each budget
+==========+==========+============+==========+===============+=======================+
|   budget |     peak | added time | at least | runs of an op | method                |
+==========+==========+============+==========+===============+=======================+
| 2.000 GB | 2.000 GB |      50.0% |    30.0% |       up to 3 | nested chain          |
| 2.500 GB | 2.250 GB |      25.0% |    20.0% |       up to 2 | minimum cut, polished |
| 3.000 GB | 3.000 GB |      10.0% |    10.0% |       up to 2 | minimum cut           |
| 4.000 GB | 4.000 GB |       0.0% |     0.0% |             1 | save all              |
+==========+==========+============+==========+===============+=======================+
Recipes, and memopt within the same peak
+================+==========+============+========+
| recipe         |     peak | added time | memopt |
+================+==========+============+========+
| save all       | 4.000 GB |       0.0% |   0.0% |
| per block      | 2.600 GB |      30.0% |  25.0% |
| every 2 blocks | 2.620 GB |      30.0% |  25.0% |
+================+==========+============+========+
note: captured in 2 regions, since [the forward breaks]""",
    )
    assert str(made_up()) == made_up().table() == render(made_up())


def test_width() -> None:
    assert max(map(len, render(solved(), width=60).splitlines())) <= 60


def test_small_steps_are_told_apart() -> None:
    near = [FrontierPoint(0.6 + n * 1e-4, 0.6 + n * 1e-4, 0.3 - n * 0.1, 0.0, "repaired", 2) for n in range(4)]
    text = render(replace(made_up(), points=tuple(near), plain_gb=0.6003, smallest_gb=0.6, recipes=()))
    assert [f"{614.4 + n * 0.1024:.4f} MB" in text for n in range(4)] == [True] * 4


def test_one_point() -> None:
    only = replace(made_up(), points=made_up().points[-1:], smallest_gb=4.0, recipes=())
    assert "4.000 GB" in render(only)


def test_long_curves_are_thinned_to_where_they_bend() -> None:
    steep = [FrontierPoint(1 + n / 1000, 1.0, 1 - n / 25, 0.0, "", 2) for n in range(20)]
    flat = [FrontierPoint(1.02 + n / 10, 1.0, 0.2 - n / 1000, 0.0, "", 2) for n in range(20)]
    points = tuple(steep + flat)
    shown = spread(points)
    assert len(shown) <= 16
    assert (shown[0], shown[-1]) == (points[0], points[-1])
    assert list(shown) == sorted(shown, key=lambda point: point.budget_gb)
    assert min(sum(point in part for point in shown) for part in (steep, flat)) >= 6
    assert spread(points[:16]) == points[:16]
