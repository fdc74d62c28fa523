"""A cache of one value, computed once for a problem and used at all its budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from memopt.solver.problem import RematProblem

Value = TypeVar("Value")


class PerProblem(Generic[Value]):
    """Calls `make(problem)` and caches the result until it is called with another problem (compared by identity)."""

    def __init__(self, make: Callable[[RematProblem], Value]) -> None:
        self._make = make
        self._last: tuple[RematProblem, Value] | None = None

    def __call__(self, problem: RematProblem) -> Value:
        if self._last is None or self._last[0] is not problem:
            self._last = (problem, self._make(problem))
        return self._last[1]
