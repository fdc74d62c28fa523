"""A mixed-integer linear program, built row by row and solved by scipy's HiGHS."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from memopt.solver.arrays import Floats

Terms = Iterable[tuple[int, float]]
"""The terms of a linear expression, as pairs (variable, coefficient)."""


class LinearModel:
    """Minimises a linear cost of variables between 0 and 1 under linear inequalities."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._integral: list[int] = []
        self._lowest: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._most: list[float] = []

    def variable(self, cost: float = 0.0, *, integral: bool = False, lowest: float = 0.0) -> int:
        """Add a variable between `lowest` and 1, with `cost` as its coefficient in the cost; returns its number."""
        self._cost.append(cost)
        self._integral.append(int(integral))
        self._lowest.append(lowest)
        return len(self._cost) - 1

    @property
    def variables(self) -> int:
        """The number of variables."""
        return len(self._cost)

    def at_most(self, terms: Terms, most: float) -> None:
        """Add the constraint that the sum of the terms is at most `most`."""
        for variable, coefficient in terms:
            self._rows.append(len(self._most))
            self._columns.append(variable)
            self._values.append(coefficient)
        self._most.append(most)

    def within(self, variable: int, others: Iterable[int]) -> None:
        """Add the constraint that the variable is at most the sum of the others."""
        self.at_most([(variable, 1.0), *((other, -1.0) for other in others)], 0.0)

    def cost_at_most(self, most: float) -> None:
        """Add the constraint that the cost is at most `most`."""
        self.at_most([(v, cost) for v, cost in enumerate(self._cost) if cost], most)

    def solve(self, seconds: float, relative_gap: float, nodes: int | None = None) -> tuple[Floats | None, float, bool]:
        """The best values found (None without any), a lower bound on the cost, and whether the search was completed.

        The search ends after `seconds` of wall time, after `nodes` nodes of its tree, or within `relative_gap`.
        """
        if not self._cost:
            return (np.zeros(0), 0.0, True) if min(self._most, default=0.0) >= 0 else (None, float("inf"), True)
        shape = (len(self._most), len(self._cost))
        matrix = csr_array((self._values, (self._rows, self._columns)), shape=shape)
        result = milp(
            np.array(self._cost),
            integrality=np.array(self._integral),
            bounds=Bounds(np.array(self._lowest), np.ones(len(self._cost))),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self._most)),
            options={
                "time_limit": seconds,
                "mip_rel_gap": relative_gap,
                **({} if nodes is None else {"node_limit": nodes}),
            },
        )
        if result.status == 2:
            return None, float("inf"), True
        bound = result.mip_dual_bound
        return result.x, 0.0 if bound is None else float(bound), result.status == 0
