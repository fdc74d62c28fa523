"""What each source of plans is worth: the portfolio without it, at budgets down to the floor: a JSON file and a table.

    python -m benchmarks.ablation [--only "U-Net" …] [--without polish …] [--efforts fast default best] [--problems F]

The problems are those of `benchmarks.frontier`, and small ones. Each budget is
solved by itself, as a user asks for it, not from the plan of another budget. Points are of added time in
percent of the step. `--problems` keeps captured problems in a folder, since capture takes longer than the solving.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.frontier import captured
from benchmarks.real_models import BY_NAME
from benchmarks.stamp import stamp, write_result
from examples.models.problems import chain, random_problem, unet
from memopt.solver import Infeasible, Portfolio, RematProblem, Schedule, portfolio, simulate, warm_up
from memopt.solver.chain_plans import NestedChain
from memopt.solver.search import Search

RESULT = Path(__file__).parent / "results" / "ablation.json"
SHARES = (0.0, 0.003, 0.01, 0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.9)
"""Budgets between the smallest peak of the whole portfolio (0) and that of saving everything (1)."""
SHARES_BEST = (0.003, 0.03, 0.15, 0.5)
CHANGED = 0.1
"""A plan counts as changed from this difference in points."""

SMALL: dict[str, Callable[[], RematProblem]] = {
    "chain of 16": lambda: chain(16),
    "chain of 48": lambda: chain(48),
    "chain of 200": lambda: chain(200),
    "hourglass of 3 levels": lambda: unet(3),
    **{f"random {seed}": lambda s=seed: random_problem(random.Random(s), 8 + s % 24) for seed in range(100, 112)},
}

SOURCES: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "nothing": (),
    "minimum cut": ((Portfolio, "_hull_plans", []),),
    "recipes": ((portfolio, "recipes", lambda problem: {"save all": Schedule.save_all(problem)}),),
    "nested chain": (
        (NestedChain, "plans", lambda self, budget_bytes: []),
        (NestedChain, "table", lambda self, cap_bytes: None),
    ),
    "repair": ((Search, "repaired", lambda self, seed, rule: None),),
    "polish": ((Search, "polish", lambda self, plan, method=None: None),),
    "local search": ((Search, "explore", lambda self, save_all, seeds, evaluations: None),),
}
"""The patches by which each source proposes nothing: owner, attribute, value."""


AND = "; "
"""The separator of the commands whose records the result file holds."""


def solved(problem: RematProblem, without: str, budgets: list[int], effort: Any, seconds: float) -> list[float | None]:
    """Return the added time in percent at each budget, None where no plan is found."""
    with ExitStack() as stack:
        for owner, name, value in SOURCES[without]:
            stack.enter_context(patch.object(owner, name, value))
        solver = Portfolio(problem)
        return [_added(problem, solver, budget_bytes, effort, seconds) for budget_bytes in budgets]


def _added(problem: RematProblem, solver: Portfolio, budget_bytes: int, effort: Any, seconds: float) -> float | None:
    solver._found.clear()
    try:
        return 100 / problem.seconds * solver.solve(budget_bytes, effort, limit_seconds=seconds).added_seconds
    except Infeasible:
        return None


def measure(
    name: str, problem: RematProblem, sources: list[str], efforts: list[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield a record for each effort and source."""
    least, most = Portfolio(problem).smallest().peak_bytes, simulate(problem, Schedule.save_all(problem)).peak_bytes
    for effort in efforts:
        shares = SHARES_BEST if effort == "best" else SHARES
        budgets = sorted({int(least + share * (most - least)) for share in shares})
        whole = solved(problem, "nothing", budgets, effort, seconds)
        for source in sources:
            rest = solved(problem, source, budgets, effort, seconds)
            more = [b - a for a, b in zip(whole, rest, strict=True) if a is not None and b is not None]
            yield {
                "problem": name, "ops": len(problem.ops), "forward_ops": problem.forward_ops, "effort": effort,
                "without": source, "budgets": len(budgets), "whole": whole, "rest": rest,
                "slower": sum(points >= CHANGED for points in more), "most": max(more, default=0.0),
                "faster": sum(points <= -CHANGED for points in more), "least": min(more, default=0.0),
                "infeasible": sum(a is not None and b is None for a, b in zip(whole, rest, strict=True)),
            }  # fmt: skip


def problem_of(name: str, folder: Path | None) -> RematProblem:
    """Return a problem by name; one captured from a model is read from `folder` if it is there, else written there."""
    if name in SMALL:
        return SMALL[name]()
    path = None if folder is None else folder / f"{name.replace('/', ' ')}.pickle"
    if path is not None and path.exists():
        return pickle.loads(path.read_bytes())
    problem = captured(BY_NAME[name])[0].problem
    if path is not None:
        path.write_bytes(pickle.dumps(problem))
    return problem


def table(records: list[dict[str, Any]]) -> Table:
    """Return what the plans lose without each source, at each effort, over all budgets."""
    shown = Table(title="The portfolio without one source of plans")
    columns = ("effort", "without", "budgets", "slower by 0.1 points", "most", "faster by 0.1", "infeasible", "where")
    for column in columns:
        shown.add_column(column, justify="left" if column in ("effort", "without", "where") else "right")
    for effort in dict.fromkeys(record["effort"] for record in records):
        for source in SOURCES:
            rows = [row for row in records if row["effort"] == effort and row["without"] == source]
            if rows:
                where = [row["problem"] for row in rows if row["slower"] or row["infeasible"]]
                shown.add_row(
                    effort, source, str(sum(row["budgets"] for row in rows)), str(sum(row["slower"] for row in rows)),
                    f"{max(row['most'] for row in rows):.2f}", str(sum(row["faster"] for row in rows)),
                    str(sum(row["infeasible"] for row in rows)), f"{len(where)} of {len(rows)} problems",
                )  # fmt: skip
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*BY_NAME, *SMALL], default=[*SMALL, *BY_NAME])
    parser.add_argument("--without", nargs="+", choices=list(SOURCES)[1:], default=list(SOURCES)[1:])
    parser.add_argument("--efforts", nargs="+", choices=("fast", "default", "best"), default=["fast", "default"])
    parser.add_argument("--seconds", type=float, default=3.0, help="the limit of effort best, for one budget")
    parser.add_argument("--problems", type=Path)
    parser.add_argument("--show", action="store_true", help="print the table of the result file, measure nothing")
    chosen = parser.parse_args()
    if not chosen.show:
        warm_up()
        for name in chosen.only:
            before = json.loads(RESULT.read_text()) if RESULT.exists() else {"command": "", "records": []}
            new = list(measure(name, problem_of(name, chosen.problems), chosen.without, chosen.efforts, chosen.seconds))
            measured = {(row["problem"], row["effort"], row["without"]) for row in new}
            kept = [row for row in before["records"] if (row["problem"], row["effort"], row["without"]) not in measured]
            latest = stamp()
            commands = filter(None, [*before["command"].split(AND), latest["command"]])
            latest["command"] = AND.join(dict.fromkeys(commands))
            write_result(RESULT, {**latest, "records": [*kept, *new]})
    Console(width=140).print(table(json.loads(RESULT.read_text())["records"]))


if __name__ == "__main__":
    main()
