"""Into how many microbatches a batch is split, where an optimised model's step would not fit otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from memopt.capture.inputs import call_signature
from memopt.errors import BudgetError, CaptureError
from memopt.microbatch import is_series, samples_of, split
from memopt.planning.levers import MICROBATCH
from memopt.planning.plan import Plan
from memopt.run.planned_call import planned_call_of
from memopt.train.ranks import unwrapped


class Splitting:
    """The number of equal pieces for each kind of batch: 1 until a plan is refused."""

    def __init__(self, model: nn.Module, microbatches: int | None) -> None:
        self.model, self.fixed = model, microbatches
        self._pieces: dict[str, int] = {}

    def pieces(self, batch: Any) -> int:
        """Into how many pieces this batch is to be split, as far as is known."""
        return self.fixed or (self._pieces.get(_kind_of(batch), 1) if self._pieces else 1)

    def more(self, batch: Any, refused: BudgetError) -> int:
        """The least number of pieces above the present one with which the step fits, by planning; it is kept.

        Raises `refused` where the user has set the number, does not allow the lever or gives microbatches himself,
        where pieces would have batch statistics of their own, and where not even single samples fit.
        """
        planned = planned_call_of(unwrapped(self.model))
        if planned is None or self.fixed or is_series(batch) or MICROBATCH not in planned.options.allow:
            raise refused
        least = refused
        for number in _divisors_above(self.pieces(batch), samples_of(batch)):
            try:  # as a piece that comes after others, whose gradients are there
                plan = planned.plan(split(batch, number)[0], gradients_held=True, advise=False)
            except BudgetError as error:
                least = min(least, error, key=lambda each: each.smallest_bytes)
                continue
            except CaptureError:  # the model takes no batch so small
                break
            self._check_statistics(plan, number, refused)
            self._pieces[_kind_of(batch)] = number
            warnings.warn(
                f"a batch of {samples_of(batch)} samples does not fit {refused.budget_gb:.6g} GB and is trained in "
                f"{number} microbatches, weighted by their tokens; a loss that compares samples with each other would "
                "be another one: give TrainStep microbatches=1 to be refused instead",
                stacklevel=4,
            )
            return number
        raise least

    def _check_statistics(self, plan: Plan, number: int, refused: BudgetError) -> None:
        assert plan.captured is not None
        if any(region.has_batch_statistics for region in plan.captured.regions):
            instead = (
                f"{number} microbatches would fit, but batch normalisation would see each by itself: give TrainStep "
                f"microbatches={number} if that is what you want"
            )
            raise BudgetError(
                refused.budget_bytes, refused.smallest_bytes, refused.dominated_by, further=(*refused.further, instead)
            ) from None


def _kind_of(batch: Any) -> str:
    return call_signature(((batch,), {}))


def _divisors_above(number: int, samples: int) -> Iterator[int]:
    return (each for each in range(number + 1, samples + 1) if samples % each == 0)
