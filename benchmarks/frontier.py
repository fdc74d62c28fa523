"""The frontier of memory and added time on real models, beside every other method: a JSON file and two tables.

    python -m benchmarks.frontier [--only "U-Net"] [--points 200] [--jobs 2] [--full curves.json]

Results go to the file model by model, in place of older ones: torch's solvers take hours for all. The file keeps what
the two tables show, the figures over all budgets and a few budgets of each model; `--full` writes every budget.

Every method sees the same joint graph of a step in bfloat16, captured on the meta device, and is judged by the same
simulator. An op takes max(FLOPs / 553e12, bytes / 4.3e12, 5e-6) seconds; workspaces are those of a GPU. A peak counts
the parameters, GB are 10^9 bytes, added time is in percent of the step. torch's partitioner saves what it chooses at
each `activation_memory_budget` and by each of its solvers, and recomputes just in time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

import memopt
from benchmarks.real_models import BY_NAME, MODELS, RealModel
from benchmarks.stamp import stamp, write_result
from benchmarks.torch_partitioner import SOLVERS, TorchPartitioner
from memopt.device import Hardware
from memopt.planning.planner import Joined
from memopt.solver import Infeasible, Portfolio, RematProblem, Schedule, Solution, floor_bytes, simulate, warm_up
from memopt.solver.arrays import arrays_of, to_array
from memopt.solver.min_cut import CutNetwork, just_in_time, lower_hull
from memopt.solver.search import Candidate, Search, candidate

RESULT = Path(__file__).parent / "results" / "frontier.json"
PRICES = Hardware(
    name="553 TFLOP/s, 4.3 TB/s, 5 µs",
    flops=dict.fromkeys(("float32", "tfloat32", "bfloat16", "float16"), 553e12),
    bytes_per_second=4.3e12,
    launch_seconds=5e-6,
    memory_bytes=141 * 1024**3,
    source="SOLVER.md",
    flops_efficiency=1.0,
    bandwidth_efficiency=1.0,
)
TORCH_BUDGETS = tuple(step / 10 for step in range(11))
SHOWN_SHARES = (0.9, 0.7, 0.5, 0.3, 0.15, 0.05, 0.01)
"""The budgets that the result file keeps, between the smallest that works (0) and the plain peak (1)."""
GB = 1e9


@dataclass(frozen=True)
class Point:
    """A budget, and the least added time of each method that fits it, in percent; None where it does not fit."""

    budget_gb: float
    bound: float
    memopt: float
    peak_gb: float
    method: str
    most_evaluations: int
    solve_seconds: float
    """Processor time, on two cores."""
    torch: float | None
    per_block: float | None
    every_k_blocks: float | None
    sqrt_segments: float | None
    attention_only: float | None
    cut: float | None
    polished_cut: float | None


@dataclass(frozen=True)
class Frontier:
    model: str
    nodes: int
    ops: int
    step_ms: float
    save_all_gb: float
    smallest_gb: float
    floor_gb: float
    """No schedule with the first evaluations in program order goes below."""
    cut_gb: float
    """The smallest peak of the plans of the minimum cut."""
    smallest_seconds: float
    torch_seconds: float
    """Wall time of one budget of torch's, on average."""
    monotone: bool
    points: tuple[Point, ...]

    def shown(self) -> tuple[Point, ...]:
        """The points nearest to `SHOWN_SHARES`."""
        width = self.save_all_gb - self.smallest_gb
        wanted = [self.smallest_gb + share * width for share in SHOWN_SHARES]
        return tuple(min(self.points, key=lambda row: abs(row.budget_gb - budget)) for budget in wanted)

    def summary(self) -> dict[str, float | None]:
        """The figures over all points: what must hold is never beaten, near the bound, quick."""
        peers = [(row.memopt, least) for row in self.points if (least := least_peer(row)) is not None]
        gaps = [row.memopt - row.bound for row in self.points if row.budget_gb >= self.cut_gb - 1e-9]
        middle = [row for row in self.points if 0.4 <= row.budget_gb / self.save_all_gb <= 0.9]
        seconds = [row.solve_seconds for row in self.points]
        return {
            "budgets": len(self.points),
            "beaten": sum(mine > theirs + 1e-6 for mine, theirs in peers),
            "of_torch": mean_share([(row.memopt, row.torch) for row in middle]),
            "of_per_block": mean_share([(row.memopt, row.per_block) for row in middle]),
            "median_above_bound": median(gaps),
            "most_above_bound": max(gaps),
            "median_seconds": median(seconds),
            "most_seconds": max(seconds),
        }

    def record(self) -> dict[str, Any]:
        """A model's entry in the result file."""
        return asdict(self) | self.summary() | {"points": [asdict(row) for row in self.shown()]}


@dataclass(frozen=True)
class Peers:
    """The plans of other methods by name, each with the peak that the method gave it."""

    by_name: dict[str, list[Candidate]]

    def least(self, problem: RematProblem, name: str, budget_bytes: int) -> float | None:
        fitting = [plan.added_seconds for plan in self.by_name.get(name, []) if plan.peak_bytes <= budget_bytes]
        return 100 * min(fitting) / problem.seconds if fitting else None


def captured(model: RealModel) -> tuple[Joined, memopt.Plan]:
    plan = memopt.plan(model.make(), 10_000, model.batch(), optimizer=None, device="h200", precision="fp32")
    assert plan.captured is not None
    joined = plan.priced.priced_for(hardware=PRICES, accumulating=False).problem
    problem = replace(joined.problem, resident_bytes=plan.account.parameters + plan.account.buffers)
    return replace(joined, problem=problem), plan


def peers_of(joined: Joined, plan: memopt.Plan, portfolio: Portfolio) -> tuple[Peers, float]:
    problem = joined.problem
    arrays = arrays_of(problem)
    assert plan.captured is not None
    partitioner = TorchPartitioner(plan.captured.regions[0], joined.prices[0])
    by_name: dict[str, list[Candidate]] = {}
    start = time.perf_counter()
    choices = {partitioner.saved(budget, solver) for solver in SOLVERS for budget in TORCH_BUDGETS}
    torch_seconds = (time.perf_counter() - start) / (len(SOLVERS) * len(TORCH_BUDGETS))
    by_name["torch"] = [candidate(arrays, "torch", to_array(just_in_time(problem, saved))) for saved in choices]
    cuts = [just_in_time(problem, cut.saved) for cut in lower_hull(CutNetwork(problem))]
    by_name["cut"] = [candidate(arrays, "cut", to_array(schedule)) for schedule in cuts]
    for baseline in portfolio.baselines():
        name = "every k blocks" if baseline.name.startswith("every") else baseline.name
        plan_ = Candidate(
            baseline.name, to_array(Schedule.save_all(problem)), baseline.peak_bytes, baseline.added_seconds
        )
        by_name.setdefault(name, []).append(plan_)
    return Peers(by_name), torch_seconds


def polished_cut(problem: RematProblem, peers: Peers, budget_bytes: int) -> float | None:
    """Return the least added time of the cut's plans that fit, after polishing spends the memory they leave free."""
    search = Search(arrays_of(problem), budget_bytes)
    fitting = [plan for plan in peers.by_name["cut"] if plan.peak_bytes <= budget_bytes]
    for plan in sorted(fitting, key=lambda plan: plan.added_seconds)[:3]:
        search.offer(plan)
        search.polish(plan)
    return 100 * search.best.added_seconds / problem.seconds if search.best else None


def measure(name: str, points: int) -> Frontier:
    joined, plan = captured(BY_NAME[name])
    problem = joined.problem
    warm_up()
    portfolio = Portfolio(problem)
    peers, torch_seconds = peers_of(joined, plan, portfolio)
    start = time.process_time()
    smallest = portfolio.smallest().peak_bytes
    smallest_seconds = time.process_time() - start
    save_all = simulate(problem, Schedule.save_all(problem)).peak_bytes
    cut = min(candidate.peak_bytes for candidate in peers.by_name["cut"])
    budgets = {int(smallest + (save_all - smallest) * (step / (points - 1)) ** 1.5) for step in range(points)}
    own = {plan.peak_bytes for plans in peers.by_name.values() for plan in plans if plan.peak_bytes < save_all}
    solved = {budget_bytes: solve(portfolio, budget_bytes) for budget_bytes in sorted(budgets | own)}
    rows = [point(problem, solved, peers, budget_bytes) for budget_bytes in solved]
    pairs = list(itertools.pairwise(rows))
    return Frontier(
        model=name,
        nodes=sum(len(region.module.graph.nodes) for region in plan.captured.regions) if plan.captured else 0,
        ops=len(problem.ops),
        step_ms=1e3 * problem.seconds,
        save_all_gb=save_all / GB,
        smallest_gb=smallest / GB,
        floor_gb=floor_bytes(problem) / GB,
        cut_gb=cut / GB,
        smallest_seconds=smallest_seconds,
        torch_seconds=torch_seconds,
        monotone=all(a.memopt >= b.memopt and a.peak_gb <= b.peak_gb for a, b in pairs),
        points=tuple(rows),
    )


def solve(portfolio: Portfolio, budget_bytes: int) -> tuple[Solution, float]:
    """Return the solution for a budget, and the seconds of processor time that it took."""
    start = time.process_time()
    try:
        return portfolio.solve(budget_bytes), time.process_time() - start
    except Infeasible:
        raise AssertionError(f"a peer fits {budget_bytes / GB:.3f} GB and memopt does not") from None


def point(problem: RematProblem, solved: dict[int, tuple[Solution, float]], peers: Peers, budget_bytes: int) -> Point:
    """Return a row; its schedule is the fastest of those found for any budget that fits this one, as in `frontier`."""
    bound, seconds = solved[budget_bytes][0].lower_bound_seconds, solved[budget_bytes][1]
    fitting = [solution for solution, _ in solved.values() if solution.peak_bytes <= budget_bytes]
    solution = min(fitting, key=lambda found: (found.added_seconds, found.peak_bytes))
    percent = 100 / problem.seconds
    return Point(
        budget_gb=budget_bytes / GB,
        bound=bound * percent,
        memopt=solution.added_seconds * percent,
        peak_gb=solution.peak_bytes / GB,
        method=solution.method,
        most_evaluations=1 + max(solution.schedule.recomputed().values(), default=0),
        solve_seconds=seconds,
        torch=peers.least(problem, "torch", budget_bytes),
        per_block=peers.least(problem, "per block", budget_bytes),
        every_k_blocks=peers.least(problem, "every k blocks", budget_bytes),
        sqrt_segments=peers.least(problem, "sqrt(L) segments", budget_bytes),
        attention_only=peers.least(problem, "attention only", budget_bytes),
        cut=peers.least(problem, "cut", budget_bytes),
        polished_cut=polished_cut(problem, peers, budget_bytes),
    )


PEER_COLUMNS = ("torch", "per_block", "every_k_blocks", "sqrt_segments", "attention_only")


def curves(records: list[dict[str, Any]]) -> Table:
    """A few budgets of each model."""
    table = Table(title="Added time in percent of the step, at a budget in GB")
    columns = ("model", "budget", "bound", "memopt", *PEER_COLUMNS, "cut", "polished_cut")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == "model" else "right")
    for record in records:
        for row in record["points"]:
            texts = ("–" if row[name] is None else f"{row[name]:.1f}" for name in columns[2:])
            table.add_row(record["model"], f"{row['budget_gb']:.2f}", *texts)
        table.add_section()
    return table


def summary(records: list[dict[str, Any]]) -> Table:
    """The table of what must hold: memopt is never beaten, near the bound and the floor, and quick."""
    table = Table(title="Between the smallest peak and saving everything")
    for column in (
        "model", "ops", "beaten by a peer", "of torch's", "of per block's", "above the bound: median", "most",
        "smallest / floor", "monotone", "median s", "most s", "smallest s", "torch s",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "model" else "right")
    for record in records:
        shares = ("–" if record[name] is None else f"{record[name]:.2f}" for name in ("of_torch", "of_per_block"))
        table.add_row(
            record["model"],
            str(record["ops"]),
            f"{record['beaten']} of {record['budgets']}",
            *shares,
            f"{record['median_above_bound']:.2f}",
            f"{record['most_above_bound']:.2f}",
            f"{record['smallest_gb'] / record['floor_gb']:.3f}",
            "yes" if record["monotone"] else "no",
            f"{record['median_seconds']:.2f}",
            f"{record['most_seconds']:.2f}",
            f"{record['smallest_seconds']:.2f}",
            f"{record['torch_seconds']:.1f}",
        )
    return table


def least_peer(row: Point) -> float | None:
    return min((value for name in PEER_COLUMNS if (value := getattr(row, name)) is not None), default=None)


def mean_share(pairs: list[tuple[float, float | None]]) -> float | None:
    """The mean of memopt's added time over another method's, where that adds any."""
    shares = [mine / theirs for mine, theirs in pairs if theirs]
    return mean(shares) if shares else None


def write(record: dict[str, Any], path: Path = RESULT) -> None:
    """Put one model's record in the file, in place of what was there of it."""
    written = json.loads(path.read_text()) if path.exists() else {}
    written[record["model"]] = stamp() | record
    write_result(path, {model.name: written[model.name] for model in MODELS if model.name in written})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME))
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--full", type=Path, help="a file for every budget of every model")
    parser.add_argument("--show", action="store_true", help="print the tables of the result file, measure nothing")
    chosen = parser.parse_args()
    names = chosen.only or [model.name for model in MODELS]
    if not chosen.show:
        with ProcessPoolExecutor(chosen.jobs, max_tasks_per_child=1) as pool:
            futures = [pool.submit(measure, name, chosen.points) for name in names]
            for number, future in enumerate(as_completed(futures), 1):
                print(f"{number} of {len(names)} models", file=sys.stderr)
                write(future.result().record())
                if chosen.full:
                    write(asdict(future.result()), chosen.full)
    records = [record for name, record in json.loads(RESULT.read_text()).items() if name in names]
    console = Console(width=170)
    console.print(curves(records))
    console.print(summary(records))


if __name__ == "__main__":
    main()
