"""What the page says is what the run measures: the highest point of its timeline against measured steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import memopt
from examples.models.families import BY_NAME
from examples.models.step import train_step
from memopt.errors import GIB
from tests.show.test_page import drawn_peak, figures_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama", "vit"])
def test_the_drawn_peak_is_measured(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    model, batch = family.make(), family.batch("usual")
    plan = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
    smallest = plan.smallest_gb()
    budget_gb = smallest + 0.4 * (plan.plain_peak_gb - smallest)
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
    measured = train_step(model, batch).peak_bytes
    memopt.plan_of(model).report(tmp_path / "page.html")
    drawn = drawn_peak(figures_of((tmp_path / "page.html").read_text(encoding="utf-8")), "planned")
    assert measured <= drawn <= budget_gb * GIB
    assert drawn <= 1.02 * measured
