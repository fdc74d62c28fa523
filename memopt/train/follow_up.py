"""Acts on an effective batch once it is known whether it was skipped: schedulers step, or the user is warned."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memopt.train.step_result import Verdict


@dataclass(frozen=True)
class Outcome:
    """The result of an effective batch; its verdict may still be on the device."""

    number: int
    loss: torch.Tensor
    verdict: Verdict


class FollowUp:
    """Steps the schedulers after the optimisers, and warns once of a skipped step that a smaller scale would not mend.

    An outcome that is still on the device waits for `settle`.
    """

    def __init__(self, schedulers: Sequence[Any], scale_adapts: bool) -> None:
        self.schedulers, self.scale_adapts = schedulers, scale_adapts
        self._waiting: Outcome | None = None
        self._warned = False

    def of(self, outcome: Outcome) -> None:
        """Take the outcome of the latest effective batch, and act on it now if its verdict is on the host."""
        self._waiting = outcome
        if outcome.verdict.on_host:
            self.settle()

    def settle(self) -> None:
        """Act on the latest outcome, unless that is done; waits for the device where its verdict is there."""
        outcome, self._waiting = self._waiting, None
        if outcome is None:
            return
        if not outcome.verdict.skipped:
            for scheduler in self.schedulers:
                scheduler.step()
        elif not self._warned:
            self._warn(outcome)

    def forget(self) -> None:
        """Drop an outcome that was not acted on."""
        self._waiting = None

    def _warn(self, outcome: Outcome) -> None:
        loss = float(outcome.loss)
        finite = abs(loss) < float("inf")
        if finite and self.scale_adapts:
            return  # a smaller scale mends it
        self._warned = True
        reason = f"its loss is {loss:g}" + (", but not all of its gradients are finite" if finite else "")
        warnings.warn(
            f"step {outcome.number} was skipped: {reason}; nothing was stepped, and later steps like it are only "
            "marked as skipped in their results",
            RuntimeWarning,
            stacklevel=2,
        )
