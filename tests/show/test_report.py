from __future__ import annotations

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from memopt.account.account import Breakdown
from memopt.errors import GIB
from memopt.planning.plan import Plan
from memopt.planning.schedule_parts import ModuleRow, RegionSchedule
from memopt.show.report import BRIEF_LINES, alike, brief, folded, render
from tests.planned import ACCOUNT
from tests.show.small import IN_ASCII, MB

ROWS = (
    ModuleRow("layers.0.attention", 12, 30 * MB, 0, 0, 0.004, 0.0),
    ModuleRow("layers.0.mlp", 5, 0, 240 * MB, 10, 0.006, 0.012),
    ModuleRow("", 3, 4, 0, 0, 0.001, 0.0),
)


def plan() -> Plan:
    """A plan with figures that are easy to read."""
    return Plan(
        model="Llama[tiny]",
        hardware="h100",
        budget_bytes=2 * GIB,
        account=ACCOUNT,
        plain=Breakdown(3 * GIB, "layers.0.mlp", (("saved activations", 2 * GIB), ("parameters", GIB))),
        planned=Breakdown(GIB + 700 * MB, "mm_7", (("parameters", GIB), ("recomputed activations", 700 * MB))),
        ceiling_bytes=GIB + 700 * MB,
        step_seconds=0.25,
        added_seconds=0.05,
        held_bytes=30 * MB,
        bound_seconds=0.04,
        method="min cut, polished",
        regions=(RegionSchedule("0123", ("mm", "gelu"), 1),),
        modules=ROWS,
        notes=("captured in 2 regions, since [the forward breaks]",),
    )


def test_golden() -> None:
    assert_expected_inline(
        render(plan()).translate(IN_ASCII),
        """\
Llama[tiny], planned for h100 with min cut, polished: peak 1.68 GB, 84.2% of the budget of 2 GB (as captured 3
GB), added time 20.0% of 250 ms (no plan adds less than 16.0%; expect a step of 165 ms to 489 ms)
Where every byte goes at the peak
+========================+====================+=========+
| row                    | nothing recomputed | planned |
+========================+====================+=========+
| saved activations      |               2 GB |       - |
| parameters             |               1 GB |    1 GB |
| recomputed activations |                  - |  700 MB |
+========================+====================+=========+
| peak                   |               3 GB | 1.68 GB |
| at                     |       layers.0.mlp |    mm_7 |
+========================+====================+=========+
What each module saves for the backward, and recomputes
+====================+=====+=======+================+============+======+=======+
| module             | ops | saved | ops recomputed | recomputed | time | added |
+====================+=====+=======+================+============+======+=======+
| layers.0.attention |  12 | 30 MB |              - |          - | 4 ms |     - |
| layers.0.mlp       |   5 |     - |             10 |     240 MB | 6 ms | 12 ms |
| (model)            |   3 |   4 B |              - |          - | 1 ms |     - |
+====================+=====+=======+================+============+======+=======+
note: captured in 2 regions, since [the forward breaks]""",
    )
    assert str(plan()) == plan().table() == render(plan())


def test_width() -> None:
    assert max(map(len, render(plan(), width=60).splitlines())) <= 60


def long(blocks: int) -> Plan:
    """A plan of many blocks that are not alike, with many rows of bytes and many notes."""
    rows = tuple((f"row {number}", (30 - number) * MB) for number in range(30))
    modules = tuple(replace(row, saved_bytes=number * MB) for number, row in enumerate(deep(blocks)))
    notes = tuple(f"note {number}, {'which is long ' * 20}" for number in range(8))
    peak = sum(nbytes for _, nbytes in rows)
    planned = Breakdown(peak, "mm_7", rows)
    return replace(plan(), plain=planned, planned=planned, modules=modules, notes=notes)


@pytest.mark.parametrize("blocks", [1, 4, 12, 50])
@pytest.mark.parametrize("width", [80, 110])
def test_what_is_printed_has_at_most_forty_lines(blocks: int, width: int) -> None:
    text = brief(long(blocks), width)
    lines = text.splitlines()
    assert len(lines) <= BRIEF_LINES
    assert max(map(len, lines)) <= width
    assert lines[-1] == "all rows and modules, 5 more notes: print(plan.table())"
    assert "smaller rows" in text
    assert str(long(blocks)) == brief(long(blocks))
    assert long(blocks).table() == render(long(blocks))


def test_no_column_is_cut_off_in_eighty() -> None:
    rows = tuple(replace(row, path=f"transformer.h.{n}.attention.c_attn") for n, row in enumerate(deep(4)))
    for moved in (0, 5 * MB):
        made = replace(long(4), modules=rows, moved_bytes=moved, receipt=())
        lines = render(made, 80).splitlines()
        header = next(line for line in lines if "module" in line and "added" in line)
        assert all(name in header for name in ("saved", "recomputed", "time", "added"))
        assert "ops" not in header
        assert max(map(len, lines)) <= 80


def deep(blocks: int) -> list[ModuleRow]:
    paths = (
        f"layers.{block}.{part}" for block in range(blocks) for part in ("attention.query", "attention.key", "mlp")
    )
    return [ModuleRow(path, 1, 10, 100, 1, 0.5, 0.25) for path in paths]


def test_few_rows_are_not_summed() -> None:
    assert folded(deep(3), most=9) == deep(3)


def test_many_rows_are_summed_by_their_outer_modules() -> None:
    assert [row.path for row in folded(deep(3), most=8)][:3] == [
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
    ]
    rows = folded(deep(4), most=5)
    assert rows[1] == ModuleRow("layers.1", 3, 30, 300, 3, 1.5, 0.75)
    assert len(rows) == 4
    assert folded(deep(4), most=1) == [ModuleRow("layers", 12, 120, 1200, 12, 6.0, 3.0)]
    assert folded([]) == []


def test_alike_modules_share_a_row() -> None:
    rows = [ModuleRow("embed", 1), *(ModuleRow(f"layers.{n}", 9, 100) for n in range(3)), ModuleRow("layers.3", 9, 50)]
    assert [(first.path, last.path, times) for first, last, times in alike(rows)] == [
        ("embed", "embed", 1),
        ("layers.0", "layers.2", 3),
        ("layers.3", "layers.3", 1),
    ]
