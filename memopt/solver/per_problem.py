"""What a solver works out once for a problem and uses again at other budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from memopt.solver.problem import RematProblem

Value = TypeVar("Value")


class PerProblem(Generic[Value]):
    """Calls `make` for a problem and keeps the result until another problem is asked for."""

    def __init__(self, make: Callable[[RematProblem], Value]) -> None:
        self._make = make
        self._last: tuple[RematProblem, Value] | None = None

    def __call__(self, problem: RematProblem) -> Value:
        if self._last is None or self._last[0] is not problem:
            self._last = (problem, self._make(problem))
        return self._last[1]
