import subprocess
import sys

SOLVE = """
import random, sys
if {blocked}:
    sys.modules["numba"] = None
from memopt.solver import Portfolio
from examples.models.problems import chain, random_problem
for problem in (chain(8), random_problem(random.Random(3), 10)):
    portfolio = Portfolio(problem)
    smallest = portfolio.smallest()
    print(smallest, portfolio.solve(smallest.peak_bytes + 12))
"""


def plans(blocked: bool) -> str:
    command = [sys.executable, "-c", SOLVE.format(blocked=blocked)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_without_numba_the_plans_are_the_same() -> None:
    assert plans(blocked=True) == plans(blocked=False)
