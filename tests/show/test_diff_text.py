from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from memopt.planning.changes import DTYPE, KINDS, RECOMPUTED, Change, between
from memopt.planning.plan_graphs import in_columns
from memopt.show.diff_text import render, summary, totals
from memopt.show.plan_diffs import places

MIB = 1024**2


def change(kind: str, op: str, module: str, **fields: object) -> Change:
    fields = {"source": "/home/me/model.py:7", "code": "x = self.act(self.fc(x))", **fields}
    return replace(Change(kind, op, module, op.rstrip("_0123456789")), **fields)  # type: ignore[arg-type]


def recomputed(op: str, module: str, **fields: object) -> Change:
    return change(RECOMPUTED, op, module, **{"nbytes": MIB, "seconds": 1e-5, "times": 1, "readers": ("mm",), **fields})


def blocks(count: int) -> list[str]:
    return [f"h.{number}.fc" for number in range(count)]


def text(changes: Sequence[Change], modules: Sequence[str] = (), width: int = 120) -> str:
    return render("title", changes, modules, width).plain


def test_blocks_that_are_alike_are_said_once() -> None:
    shown = text([recomputed(f"gelu_{number}", module) for number, module in enumerate(blocks(12))])
    assert shown.splitlines() == [
        "title",
        "h.0 to h.11 (12 blocks; h.1 to h.11 like h.0)",
        "  fc recomputed    gelu_0: 1 MB for 0.01 ms, in the backward of mm".ljust(77)
        + "model.py:7  x = self.act(self.fc(x))",
    ]


def test_blocks_that_differ_are_named() -> None:
    changes = [recomputed(f"gelu_{number}", module) for number, module in enumerate(blocks(5)) if number != 1]
    title, row = text(changes, blocks(5)).splitlines()[1:]
    assert title == "h.0 to h.4 (5 blocks; h.2 to h.4 like h.0)"
    assert "gelu_0 [h.0, h.2 to h.4]: 1 MB" in row


def test_a_block_that_recomputes_more_often_is_not_alike() -> None:
    changes = [recomputed("gelu", module, times=1 + (module == "h.0.fc")) for module in blocks(3)]
    title, *rows = text(changes).splitlines()[1:]
    assert title == "h.0 to h.2 (3 blocks; h.2 like h.1)"
    assert "up to 2 MB for 0.01 ms, in the backward of mm, up to 2 times" in " ".join(map(str.strip, rows))


def test_irregular_blocks_fit_into_a_page() -> None:
    """Each of 48 blocks recomputes another half of its operators, in many modules."""
    changes = [
        recomputed(f"op{letter}_{number}", f"h.{number}.part{letter % 9}.inner{letter % 20}", source=f"m.py:{letter}")
        for number in range(48)
        for letter in range(60)
        if (number * 7 + letter * 13) % 5 < 3
    ]
    shown = text(changes)
    assert len(shown.splitlines()) < 80
    for letter in range(60):
        assert f"op{letter}_" in shown


def test_places() -> None:
    found = places(["h.0.fc", "h.1.fc", "stages.0.layers.0.conv", "stages.1.layers.3.conv", "head.0", "head.2", ""])
    assert (found["h.1.fc"].section, found["h.1.fc"].block, found["h.1.fc"].inner) == ("h.*", "h.1", "fc")
    deep = found["stages.1.layers.3.conv"]
    assert (deep.section, deep.block, deep.inner) == ("stages.*.layers.*", "stages.1.layers.3", "conv")
    assert (found["head.2"].section, found["head.2"].block) == ("head.2", "")
    assert found[""].section == ""


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_window(width: int) -> None:
    names = [recomputed(f"operator_{number}", "encoder.embed", number=number) for number in range(30)]
    shown = text(names, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert all(one.op in shown for one in names)


def test_between_two_plans() -> None:
    same, less, more = recomputed("gelu", "fc"), recomputed("relu", "fc"), recomputed("relu", "fc", times=2)
    assert between((same, less), (same,)) == (replace(less, sign="-"),)
    assert between((same, less), (same, more)) == (replace(less, sign="-"), replace(more, sign="+"))
    rows = text(between((same, less), (more,))).splitlines()[1:]
    assert [row[0] for row in rows if row[0] != " "] == ["+", "-"]


def test_totals_and_summary() -> None:
    changes = [recomputed("gelu", "fc", times=2), change(DTYPE, "mm", "fc", detail="f32 → bf16")]
    assert summary(changes) == "2 recomputed"
    assert totals(changes) == "2 recomputed (2 MB in 0.01 ms), 1 in another dtype"
    assert summary(changes[1:]) == totals(changes[1:]) == "1 in another dtype"
    assert summary([]) == totals([]) == "no change"
    assert text([]) == "title"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_shown(kind: str) -> None:
    row = text([change(kind, "mm", "fc", detail="detail", reason="reason", times=1)]).splitlines()[1]
    assert ("detail" if kind == DTYPE else kind) in row
    assert "mm" in row
    assert "model.py:7" in row


def test_notebooks_show_columns() -> None:
    assert "monospace" in in_columns("a | b")
    assert ">a &lt; b</pre>" in in_columns("a < b")
