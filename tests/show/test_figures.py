"""Tables and pictures need only values with the figures that they show."""

from __future__ import annotations

from pathlib import Path

from expecttest import assert_expected_inline

from memopt.show import frontier, report
from memopt.show.frontier import as_svg, draw
from tests.show.small import IN_ASCII, SmallCurve, SmallPlan


def test_a_plan() -> None:
    assert_expected_inline(
        report.render(SmallPlan()).translate(IN_ASCII),
        """\
Two[tiny], planned for h100 with min cut: peak 1 GB, 50.0% of the budget of 2 GB (as captured 3 GB), added
time 20.0% of 250 ms (no plan adds less than 10.0%; expect a step of 165 ms to 489 ms)
offloaded: 60 MB per step are copied to the host and back, at most 30 MB at a time; compute waits 2 ms for the
copies: the link to the host bounds the step
Where every byte goes at the peak
+==========================+====================+=========+
| row                      | nothing recomputed | planned |
+==========================+====================+=========+
| saved activations        |               2 GB |       - |
| parameters               |               1 GB |    1 GB |
+==========================+====================+=========+
| peak                     |               3 GB |    1 GB |
| at                       |           layers.0 |    mm_1 |
+==========================+====================+=========+
| host memory for offloads |                  - |   30 MB |
+==========================+====================+=========+
Levers in use
+=====================+======+======+========+=======+
| lever               | peak | less |   time | added |
+=====================+======+======+========+=======+
| as captured         | 3 GB |      | 250 ms |       |
| recompute           | 2 GB | 1 GB | 258 ms | +3.2% |
| offload_activations | 1 GB | 1 GB | 260 ms | +0.8% |
+=====================+======+======+========+=======+
What each module saves for the backward, and recomputes
+==========+=====+=======+===========+================+============+======+=======+
| module   | ops | saved | offloaded | ops recomputed | recomputed | time | added |
+==========+=====+=======+===========+================+============+======+=======+
| layers.0 |   2 | 30 MB |     60 MB |              - |          - | 4 ms |     - |
| layers.1 |   2 |     - |         - |              4 |     240 MB | 4 ms |  8 ms |
+==========+=====+=======+===========+================+============+======+=======+
note: one region""",
    )


def test_a_curve() -> None:
    assert_expected_inline(
        frontier.render(SmallCurve()).translate(IN_ASCII),
        """\
Two[tiny], planned for h100: from 4 GB with nothing recomputed down to 2 GB (no schedule that keeps the order
of operators holds less than 1.5 GB), added time as a share of 250 ms
The least added time for each budget
+==========+==========+============+==========+===============+=========+
|   budget |     peak | added time | at least | runs of an op | method  |
+==========+==========+============+==========+===============+=========+
| 2.000 GB | 2.000 GB |      50.0% |    25.0% |       up to 3 | by hand |
| 4.000 GB | 4.000 GB |       0.0% |     0.0% |             1 | by hand |
+==========+==========+============+==========+===============+=========+
Recipes, and memopt within the same peak
+===========+==========+============+========+
| recipe    |     peak | added time | memopt |
+===========+==========+============+========+
| per block | 3.000 GB |      75.0% |  50.0% |
+===========+==========+============+========+
note: one region""",
    )


def test_a_picture(tmp_path: Path) -> None:
    svg = as_svg(SmallCurve())
    assert svg is not None
    assert svg.startswith("<?xml")
    draw(SmallCurve(), tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 5_000
