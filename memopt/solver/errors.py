"""The exceptions that the solvers raise."""

from __future__ import annotations


class Infeasible(Exception):
    """No schedule with a peak within the budget was found.

    `smallest_peak_bytes` is the smallest budget known to work, `floor_bytes` a lower bound on the peak of every
    schedule, and `dominating_op` the index of the op that sets this bound.
    """

    def __init__(self, smallest_peak_bytes: int, floor_bytes: int, dominating_op: int) -> None:
        self.smallest_peak_bytes = smallest_peak_bytes
        self.floor_bytes = floor_bytes
        self.dominating_op = dominating_op
        super().__init__(
            f"no schedule fits the budget: the smallest peak found is {smallest_peak_bytes} bytes, "
            f"and no schedule can go below {floor_bytes} bytes, which op {dominating_op} needs"
        )


class SolverError(ValueError):
    """A user's solver raised, or proposed something other than a valid schedule; the message names the solver."""
