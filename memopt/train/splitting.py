"""Splits batches into microbatches where the step of an optimised model would not fit its budget otherwise."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from memopt.capture.inputs import call_signature
from memopt.errors import BudgetError, CaptureError
from memopt.levers.microbatch import MICROBATCH
from memopt.lru import LruCache
from memopt.microbatch import is_series, samples_of, split
from memopt.planning.plan import Plan
from memopt.run.session import session_of

MOST_SIGNATURES = 256
"""Signatures of batches whose number of pieces is remembered; the oldest one is planned again."""


class Splitting:
    """The number of equal pieces for batches of each signature (shapes and dtypes): 1 until a plan is refused."""

    def __init__(self, model: nn.Module, microbatches: int | None) -> None:
        self.model, self.fixed = model, microbatches
        self._pieces: LruCache[str, int] = LruCache(MOST_SIGNATURES)

    def pieces(self, batch: Any) -> int:
        """The number of pieces that is known to be needed for this batch; 1 where none is."""
        return self.fixed or (self._pieces.get(_signature_of(batch)) if self._pieces else None) or 1

    def more(self, batch: Any, refused: BudgetError) -> int:
        """The least number of pieces above the present one with which the step fits, found by planning and remembered.

        Raises `refused` where the user has set the number, gives microbatches or does not allow the lever, where pieces
        would have batch statistics of their own, and where not even single samples fit.
        """
        planned = session_of(self.model)
        if planned is None or self.fixed or is_series(batch) or MICROBATCH.name not in planned.options.allow:
            raise refused
        least = refused
        for number in range(self.pieces(batch) + 1, (samples := samples_of(batch)) + 1):
            if samples % number:
                continue
            try:  # as a later piece, beside the gradients of earlier ones
                plan = planned.plan(split(batch, number)[0], gradients_held=True, advise=False)
            except BudgetError as error:
                least = min(least, error, key=lambda refusal: refusal.smallest_bytes)
                continue
            except CaptureError:  # the model does not accept so small a batch
                break
            self._check_statistics(plan, number, refused)
            self._pieces[_signature_of(batch)] = number
            warnings.warn(
                f"a batch of {samples} samples does not fit {refused.budget_gb:.6g} GB and is trained in "
                f"{number} microbatches, weighted by their tokens; a loss that compares samples with each other would "
                "differ: give TrainStep microbatches=1 to be refused instead",
                stacklevel=4,
            )
            return number
        raise least

    def _check_statistics(self, plan: Plan, number: int, refused: BudgetError) -> None:
        """Raise `BudgetError` where the model normalises over the batch, so that pieces would change the numbers."""
        assert plan.captured is not None
        if any(region.has_batch_statistics for region in plan.captured.regions):
            instead = (
                f"{number} microbatches would fit, but batch normalisation would see each by itself: give TrainStep "
                f"microbatches={number} if that is what you want"
            )
            raise BudgetError(
                refused.budget_bytes,
                refused.smallest_bytes,
                refused.dominated_by,
                further=(*refused.notes, instead),
                ways=refused.ways,
            ) from None


def _signature_of(batch: Any) -> str:
    return call_signature(((batch,), {}))
