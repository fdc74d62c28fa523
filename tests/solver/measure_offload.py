"""Prints what offload gains on synthetic graphs, and how long it takes: `python -m tests.solver.measure_offload`.

Budgets are given as shares of the way from the smallest peak without offload to the peak of saving everything; added
time in percent of the step, each with its lower bound, seconds of processor time of the solve without and with offload.
"""

from __future__ import annotations

import time

from examples.models.problems import transformer, unet
from memopt.solver import Link, OffloadPortfolio, Portfolio, Schedule, simulate
from memopt.solver.problem import RematProblem

SHARES = (0.4, 0.2, 0.05)
LINKS = (Link(25e9, 1e-5), Link(50e9, 1e-5))


def measure(name: str, problem: RematProblem, shares: tuple[float, ...] = SHARES) -> None:
    """A line for each budget and link; fresh portfolios each time."""
    step = problem.seconds / 100
    smallest = Portfolio(problem).smallest().peak_bytes
    save_all = simulate(problem, Schedule.save_all(problem)).peak_bytes
    print(
        f"{name}: {len(problem.ops)} ops, step {step * 1e5:.2f} ms, "
        f"peaks {smallest / 1e9:.2f} … {save_all / 1e9:.2f} GB"
    )
    for share in shares:
        budget_bytes = int(smallest + share * (save_all - smallest))
        for link in LINKS:
            portfolio = Portfolio(problem)
            started = time.process_time()
            plain = portfolio.solve(budget_bytes)
            between = time.process_time()
            solution = OffloadPortfolio(problem, portfolio).solve(budget_bytes, link, plain=plain)
            seconds = time.process_time() - between
            offloads = len(solution.schedule.offloads)
            print(
                f"  {share:4} at {link.bytes_per_second / 1e9:.0f} GB/s: without {plain.added_seconds / step:6.2f} "
                f"(bound {plain.lower_bound_seconds / step:6.2f}, {between - started:.1f} s), with "
                f"{solution.added_seconds / step:6.2f} (bound {solution.lower_bound_seconds / step:6.2f}, waits "
                f"{solution.stall_seconds / step:.2f}, {seconds:.1f} s more), "
                f"{solution.host_bytes / 1e9:.3f} GB of host, {offloads} offloads [{solution.method}]",
                flush=True,
            )


def main() -> None:
    small = transformer(2)  # compiles or loads the kernels
    OffloadPortfolio(small).solve(int(0.7 * simulate(small, Schedule.save_all(small)).peak_bytes), LINKS[0])
    measure("transformer of 12 layers", transformer(12))
    measure("transformer of 62 layers", transformer(62, width=1600))
    measure("hourglass of 4 levels", unet())
    measure("transformer of 250 layers", transformer(250, width=1600), (0.2,))


if __name__ == "__main__":
    main()
