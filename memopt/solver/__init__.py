"""Solvers: which values of a training step to save, which to recompute and which to offload to the host.

They see a step as a `RematProblem`, which holds numbers only, and return a `Schedule`.
"""

from memopt.solver.best_effort import Progress
from memopt.solver.lower_bound import floor_bytes
from memopt.solver.offload.portfolio import OffloadPortfolio, OffloadSolution
from memopt.solver.portfolio import Baseline, Effort, Portfolio, Solution
from memopt.solver.problem import Link, Op, RematProblem, Storage
from memopt.solver.protocol import Infeasible, Solver, SolverError
from memopt.solver.save_all import SaveAll
from memopt.solver.schedule import Offload, Schedule
from memopt.solver.simulator import Simulation, simulate
from memopt.solver.warm_up import warm_up

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
    "SaveAll",
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
