"""Every loop with its one line, beside the plain loop: equal numbers, within the budget, and never ended by memopt.

A few run in `make test`, all others in `make test-all`; `python -m benchmarks.loops` makes the table of all in
docs/loops.md.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import memopt
from tests.elsewhere import counted
from tests.loops import runner
from tests.loops.all_loops import LOOPS
from tests.loops.runner import OPTIONS, SHARES, Run, outcome, run

__all__ = ["counted"]
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("counted")]


@cache
def plain(name: str) -> Run:
    return run(LOOPS[name])


def cases() -> list[object]:
    """Every loop with all options and budgets, marked as slow or as failing where it is."""
    found = []
    for loop in LOOPS.values():
        for case in (f"{options} {share}" for options in OPTIONS for share in SHARES):
            marks = [] if case in loop.quick else [pytest.mark.slow]
            if case in loop.faults:
                marks.append(pytest.mark.xfail(strict=True, reason=loop.faults[case]))
            found.append(pytest.param(loop.name, *case.split(), marks=marks))
    return found


@pytest.mark.parametrize(("name", "options", "share"), cases())
def test_loop(name: str, options: str, share: str) -> None:
    found = outcome(LOOPS[name], plain(name), options, share)
    assert found.right, found


def roomy(model: Any, budget_gb: float, **options: Any) -> Any:
    """Optimise a model for a budget in which it runs as the plain model does."""
    return memopt.optimize(model, 1000 * budget_gb, **options)


def test_a_plain_run_is_over_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "one_line", roomy)
    assert outcome(LOOPS["gat"], plain("gat"), "exact", "half").verdict == "over budget"


def test_other_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(model: Any, budget_gb: float, **options: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 1.01 * gradient + 1e-3)
        return roomy(model, budget_gb, **options)

    monkeypatch.setattr(runner, "one_line", scaled)
    assert outcome(LOOPS["gat"], plain("gat"), "exact", "half").verdict == "wrong numbers"
