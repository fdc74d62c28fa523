"""Solvers: which values of a training step to save, which to recompute and which to offload to the host.

They see a step as a `RematProblem`, which holds numbers only, and return a `Schedule`.
"""

from memopt.solver.lower_bound import floor_bytes
from memopt.solver.offload import OffloadPortfolio, OffloadSolution
from memopt.solver.portfolio import Portfolio, warm_up
from memopt.solver.problem import Link, Offload, Op, RematProblem, Schedule, Storage
from memopt.solver.protocol import Baseline, Effort, Infeasible, Solution, Solver, SolverError
from memopt.solver.search import Progress
from memopt.solver.simulator import Simulation, simulate

__all__ = [
    "Baseline",
    "Effort",
    "Infeasible",
    "Link",
    "Offload",
    "OffloadPortfolio",
    "OffloadSolution",
    "Op",
    "Portfolio",
    "Progress",
    "RematProblem",
    "Schedule",
    "Simulation",
    "Solution",
    "Solver",
    "SolverError",
    "Storage",
    "floor_bytes",
    "simulate",
    "warm_up",
]
