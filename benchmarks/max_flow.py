"""Minimum cuts of large problems: memopt's kernel beside OR-tools' and scipy's maximum flow, and their installed MB.

    python -m benchmarks.max_flow

OR-tools is no dependency of memopt: install it beside (`pip install ortools`) to have its rows. All solve the same
cuts, those of the lower hull and of the lower bound at the middle of the budgets, on problems of 12,000 and 40,000
operators. scipy's flow has 32 bits, so its costs are scaled to 2^29. A run takes at most `LIMIT_SECONDS`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.processes import record_of
from benchmarks.stamp import stamp, write_result
from examples.models.problems import transformer
from memopt.solver.arrays import Flags, Floats, Ints
from memopt.solver.lower_bound import LowerBound, floor_bytes
from memopt.solver.max_flow import FlowNetwork
from memopt.solver.min_cut import CutNetwork, lower_hull
from memopt.solver.problem import Op, RematProblem, Schedule, Storage
from memopt.solver.simulator import simulate

RESULT = Path(__file__).parent / "results" / "max_flow.json"
LIMIT_SECONDS = 240
Result = TypeVar("Result")


def uneven_chain(length: int) -> RematProblem:
    """A chain of one forward op after another, of random seconds and bytes; the backward reads 20 of its values."""
    state = random.Random(0)
    storages = [Storage(f"s{n}", 1000 * state.randint(1, 1000)) for n in range(length)]
    ops = [Op(f"f{n}", 1e-6 * state.uniform(1, 10), (n - 1,) if n else (), (n,)) for n in range(length)]
    ops.append(Op("backward", 1e-6, tuple(range(length - 1, 0, -(length // 20))), (length,)))
    return RematProblem(tuple(ops), (*storages, Storage("gradient", 4)), length)


PROBLEMS: dict[str, Callable[[], RematProblem]] = {
    "transformer, 300 layers": lambda: transformer(300),
    "transformer, 1,000 layers": lambda: transformer(1000),
    "uneven chain": lambda: uneven_chain(12000),
}


class OrTools:
    """The interface of `FlowNetwork` by OR-tools."""

    def __init__(self, tails: Ints, heads: Ints, nodes: int) -> None:
        from ortools.graph.python import max_flow

        self._nodes = nodes
        self._flow = max_flow.SimpleMaxFlow()
        self._arcs = self._flow.add_arcs_with_capacity(tails, heads, np.zeros(len(tails), np.int64))

    def cut(self, costs: Floats, source: int, sink: int) -> tuple[Flags, float]:
        capacities, scale = scaled(costs, 2**46)
        self._flow.set_arcs_capacity(self._arcs, capacities)
        assert self._flow.solve(source, sink) == self._flow.OPTIMAL
        side = np.zeros(self._nodes, np.bool_)
        side[self._flow.get_source_side_min_cut()] = True
        return side, self._flow.optimal_flow() / scale


class Scipy:
    """The interface of `FlowNetwork` by `scipy.sparse.csgraph.maximum_flow`."""

    def __init__(self, tails: Ints, heads: Ints, nodes: int) -> None:
        self._tails, self._heads, self._nodes = tails, heads, nodes

    def cut(self, costs: Floats, source: int, sink: int) -> tuple[Flags, float]:
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        capacities, scale = scaled(costs, 2**29)
        shape = (self._nodes, self._nodes)
        network = csr_array((capacities.astype(np.int32), (self._tails, self._heads)), shape=shape)
        found = maximum_flow(network, source, sink)
        residual = (network - found.flow).tocsr()
        residual.eliminate_zeros()
        side = np.zeros(self._nodes, np.bool_)
        side[breadth_first_order(residual, source, return_predecessors=False)] = True
        return side, found.flow_value / scale


METHODS = {"memopt": FlowNetwork, "OR-tools": OrTools, "scipy": Scipy}
PACKAGES = {
    "memopt": (),
    "OR-tools": ("ortools", "pandas", "protobuf", "absl-py", "immutabledict"),
    "scipy": ("scipy",),
}


def scaled(costs: Floats, total: int) -> tuple[Ints, float]:
    """The costs as integers that sum to `total`, infinite ones as twice that, and the factor."""
    forbidden = np.isinf(costs)
    finite = np.where(forbidden, 0.0, costs)
    scale = total / float(finite.sum())
    return np.where(forbidden, 2 * total - 1, np.floor(finite * scale)).astype(np.int64), scale


def shortest(work: Callable[[], Result]) -> tuple[float, Result]:
    """The least CPU seconds of three runs, and what the last one returned."""
    seconds = []
    for _ in range(3):
        start = time.process_time()
        result = work()
        seconds.append(time.process_time() - start)
    return min(seconds), result


def measure(problem_name: str, method: str) -> dict[str, Any]:
    """CPU seconds of the hull and of the bound by one method, and what they are."""
    problem = PROBLEMS[problem_name]()
    most = simulate(problem, Schedule.save_all(problem)).peak_bytes
    budget = (floor_bytes(problem) + most) // 2
    with mock.patch("memopt.solver.min_cut.FlowNetwork", METHODS[method]):
        hull_seconds, hull = shortest(lambda: lower_hull(CutNetwork(problem)))
        bound_seconds, bound = shortest(lambda: LowerBound(problem).added_seconds(budget))
    return {
        "problem": problem_name,
        "operators": len(problem.ops),
        "method": method,
        "hull_seconds": hull_seconds,
        "vertices": len(hull),
        "hull": hash(tuple((cut.saved_bytes, round(cut.recompute_seconds, 12)) for cut in hull)),
        "bound_seconds": bound_seconds,
        "bound_percent": 100 * bound / problem.seconds,
    }


def installed_mb(method: str) -> float | None:
    """MB of the files of the packages that a method brings; None if they are not installed."""
    try:
        files = [file for name in PACKAGES[method] for file in importlib.metadata.files(name) or ()]
    except importlib.metadata.PackageNotFoundError:
        return None
    return sum(file.size or 0 for file in files) / 2**20


def run(problem: str, method: str) -> dict[str, Any]:
    """`measure` in a process of its own; a row without figures if it takes too long."""
    arguments = "--problem", problem, "--method", method
    try:
        found: dict[str, Any] = record_of("max_flow", *arguments, limit_seconds=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"problem": problem, "method": method, "over_seconds": LIMIT_SECONDS}
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title="Minimum cuts of large problems")
    for column in (
        "problem",
        "operators",
        "method",
        "hull, CPU s",
        "vertices",
        "same hull",
        "bound, CPU s",
        "bound %",
        "MB",
    ):
        shown.add_column(column, justify="left" if column in ("problem", "method") else "right")
    for row in rows:
        if "over_seconds" in row:
            shown.add_row(row["problem"], "", row["method"], f"over {row['over_seconds']}")
            continue
        figures = (f"{row['hull_seconds']:.2f}", str(row["vertices"]), "yes" if row["same_hull"] else "no")
        bound = (f"{row['bound_seconds']:.2f}", f"{row['bound_percent']:.6f}", f"{row['installed_mb']:.0f}")
        shown.add_row(row["problem"], str(row["operators"]), row["method"], *figures, *bound)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", choices=PROBLEMS)
    parser.add_argument("--method", choices=METHODS)
    chosen = parser.parse_args()
    if chosen.problem and chosen.method:
        print(json.dumps(measure(chosen.problem, chosen.method)))
        return
    rows = []
    for problem in PROBLEMS:
        ours = None
        for method in METHODS:
            weight = installed_mb(method)
            if weight is None:
                continue
            row = run(problem, method)
            ours = row.get("hull") if method == "memopt" else ours
            if "over_seconds" not in row:
                row |= {"same_hull": row.pop("hull") == ours, "installed_mb": weight}
            rows.append(row)
    write_result(RESULT, {**stamp(), "rows": rows})
    Console(width=120).print(table(rows))


if __name__ == "__main__":
    main()
