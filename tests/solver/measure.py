"""Prints what the portfolio reaches on synthetic graphs, and how long it takes: `python -m tests.solver.measure`.

Budgets are given as shares of the way from the smallest peak found to the peak of saving everything; added time in
percent of the step, beside the lower bound, the best plan of the minimum cut and the best baseline that fit.
"""

from __future__ import annotations

import random
import time

from examples.models.problems import chain, random_problem, transformer, unet
from memopt.solver import Portfolio, Schedule, floor_bytes, simulate
from memopt.solver.problem import RematProblem

SHARES = (0.7, 0.4, 0.2, 0.1, 0.03)


def measure(name: str, problem: RematProblem) -> None:
    """One line for the smallest peak, one for each budget; a fresh portfolio each time."""
    step = problem.seconds / 100
    save_all = simulate(problem, Schedule.save_all(problem)).peak_bytes
    started = time.process_time()
    smallest = Portfolio(problem).smallest()
    print(
        f"{name}: {len(problem.ops)} ops; smallest peak {smallest.peak_bytes / floor_bytes(problem):.3f} of the floor, "
        f"{smallest.peak_bytes / save_all:.3f} of save-all, added {smallest.added_seconds / step:.1f}%, "
        f"{time.process_time() - started:.2f} s"
    )
    for share in SHARES:
        budget_bytes = int(smallest.peak_bytes + share * (save_all - smallest.peak_bytes))
        portfolio = Portfolio(problem)
        started = time.process_time()
        solution = portfolio.solve(budget_bytes)
        seconds = time.process_time() - started
        fitting = [b.added_seconds for b in portfolio.baselines() if b.peak_bytes <= budget_bytes]
        baseline = f"{min(fitting) / step:6.2f}" if fitting else "     –"
        most = max(solution.schedule.recomputed().values(), default=0) + 1
        bound, added = solution.lower_bound_seconds / step, solution.added_seconds / step
        print(
            f"  {share:4}: bound {bound:6.2f}, memopt {added:6.2f}, best baseline {baseline}; "
            f"evaluated up to {most} times; {seconds:.2f} s [{solution.method}]"
        )


def main() -> None:
    Portfolio(transformer(2)).smallest()  # compiles or loads the kernels
    measure("transformer of 12 layers", transformer(12))
    measure("transformer of 62 layers", transformer(62, width=1600))
    measure("hourglass of 4 levels", unet())
    measure("hourglass of 6 levels", unet(6, size=128))
    measure("chain of 100", chain(100))
    measure("random graph", random_problem(random.Random(5), 1200))


if __name__ == "__main__":
    main()
