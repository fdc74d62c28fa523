"""How the time to solve grows with the graph: GPT-2 of 6 to 320 layers, the default effort; one JSON file and a table.

    python -m benchmarks.growth [--layers 6 12 25]

Seconds are processor time, with a new portfolio for each budget. A budget's share is where it lies between the smallest
peak (0) and that of saving everything (1).
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import memopt
from benchmarks.frontier import PRICES
from benchmarks.real_models import gpt2, tokens
from benchmarks.stamp import stamp, write_result
from memopt.solver import Portfolio, Schedule, simulate, warm_up

RESULT = Path(__file__).parent / "results" / "growth.json"
LAYERS = (6, 12, 25, 50, 100, 200, 320)
SHARES = (0.5, 0.2, 0.05, 0.02, 0.005)


@dataclass(frozen=True)
class Row:
    layers: int
    nodes: int
    ops: int
    smallest_seconds: float
    seconds: tuple[float, ...]
    """CPU seconds to solve, for each of the shares."""
    above_bound: tuple[float, ...]
    """Added time above the lower bound for each share, in percent of the step."""


def measure(layers: int) -> Row:
    plan = memopt.plan(
        gpt2(n_layer=layers)(), 10_000, tokens(8, 1024)(), optimizer=None, device="h200", precision="fp32"
    )
    assert plan.captured is not None
    problem = plan.priced.priced_for(hardware=PRICES, accumulating=False).problem.problem
    save_all = simulate(problem, Schedule.save_all(problem)).peak_bytes
    start = time.process_time()
    smallest = Portfolio(problem).smallest().peak_bytes
    smallest_seconds = time.process_time() - start
    seconds, above = [], []
    for share in SHARES:
        start = time.process_time()
        solution = Portfolio(problem).solve(int(smallest + share * (save_all - smallest)))
        seconds.append(time.process_time() - start)
        above.append(100 * (solution.added_seconds - solution.lower_bound_seconds) / problem.seconds)
    nodes = sum(len(region.module.graph.nodes) for region in plan.captured.regions)
    return Row(layers, nodes, len(problem.ops), smallest_seconds, tuple(seconds), tuple(above))


def exponent(rows: list[Row]) -> float:
    """Return the exponent by which the mean time grows with the operators, from the first graph to the last."""
    first, last = rows[0], rows[-1]
    return math.log(sum(last.seconds) / sum(first.seconds)) / math.log(last.nodes / first.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    layers = parser.parse_args().layers
    warm_up()
    rows = [measure(count) for count in layers]
    table = Table(title="Seconds to solve (and percentage points above the lower bound)")
    for column in ("layers", "nodes", "ops", *(f"at {share}" for share in SHARES), "smallest"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = (f"{seconds:.2f} ({above:.2f})" for seconds, above in zip(row.seconds, row.above_bound, strict=True))
        table.add_row(str(row.layers), str(row.nodes), str(row.ops), *cells, f"{row.smallest_seconds:.2f}")
    if tuple(layers) == LAYERS:
        write_result(RESULT, {**stamp(), "rows": [asdict(row) for row in rows]})
    console = Console(width=130)
    console.print(table)
    if len(rows) > 1:
        console.print(f"the time grows as nodes to the power of {exponent(rows):.2f}")


if __name__ == "__main__":
    main()
