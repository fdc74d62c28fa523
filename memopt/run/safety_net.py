"""What follows where the device has no memory left for a step that was planned to fit: the call is undone, and later
ones are planned tighter."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memopt.device.devices import device_of
from memopt.errors import BudgetError
from memopt.memory_error import StepMemoryError
from memopt.planning.call_accounts import CallAccounts
from memopt.planning.plan import Plan
from memopt.run.entry import Entry
from memopt.training_state import CallState
from memopt.units import size

_TIGHTER = 8
"""After a failed allocation, steps are planned to hold at most all but this part of what the failed one was to hold."""
_ROWS = 6
"""The number of rows of the account that an error names."""


class SafetyNet:
    """Undoes training calls of one model in which an allocation failed, and has later calls planned tighter.

    `forget` drops the plans that were made so far.
    """

    def __init__(self, model: nn.Module, accounts: CallAccounts, entry: Entry, forget: Callable[[], None]) -> None:
        self.model, self.accounts, self.entry, self.forget = model, accounts, entry, forget
        self.before: CallState | None = None
        """The state of the model before the call that runs."""
        self._forwards_before = 0
        """The number of forwards that had begun before the call that runs."""

    def run(self, attempt: Callable[[], Any], inputs: Iterable[torch.Tensor], *, repeat: bool) -> Any:
        """Run a training call with these tensors by `attempt`; with `repeat` a second time, by a tighter plan, if an
        allocation of its forward fails.

        Raises `StepMemoryError` where no tighter plan works either, and where the call could not be undone.
        """
        before, self._forwards_before = CallState.of(self.model, inputs), self.entry.begun
        self.before = before
        try:
            try:
                return attempt()
            except torch.OutOfMemoryError as failure:
                failed = self._forward_failed(failure, before)
                if failed is None:
                    raise
            # Outside of the handler, whose exception would keep what the forward made.
            if not (failed.undone and repeat):
                raise failed
            return self._repeated(attempt, failed, before)
        finally:
            self.before = None

    def _repeated(self, attempt: Callable[[], Any], failed: StepMemoryError, before: CallState) -> Any:
        failed.repeated = True
        try:
            return attempt()
        except BudgetError as refused:
            before.undo()
            raise failed from refused.with_traceback(None)
        except torch.OutOfMemoryError as failure:
            again = self._forward_failed(failure, before) or failed
            again.repeated = True
            raise again from None

    def _forward_failed(self, failure: torch.OutOfMemoryError, before: CallState) -> StepMemoryError | None:
        """Undo a forward in which an allocation failed, and plan tighter; the error for the user. None where no forward
        had begun: memory ran out while the call was planned."""
        forward = self.entry.latest() if self.entry.latest else None
        if self.entry.begun == self._forwards_before or forward is None:
            return None
        forward.after_backward()  # it will have none
        failure.with_traceback(None)  # its frames hold what the forward made
        undone = before.undo()
        self._tighten(forward.plan)
        return self._error(failure, forward.plan, "forward", undone=undone)

    def backward_failed(self, failure: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Undo the call in whose backward an allocation failed, and plan tighter; the error for the user."""
        forwards = self.entry.in_backward()
        if not forwards:
            return failure
        undone = [forward.undo() for forward in forwards]
        self._tighten(forwards[0].plan)
        # Of several forwards, those that the backward has not come to yet are still there.
        return self._error(failure, forwards[0].plan, "backward", undone=all(undone) and len(forwards) == 1)

    def _tighten(self, plan: Plan) -> None:
        planned = plan.ceiling_bytes - plan.account.unforeseen
        tighter = planned - planned // _TIGHTER
        self.accounts.leave_free(plan.budget_bytes - tighter)
        self.forget()
        gc.collect()
        device_of(self.accounts.terms.device()).empty_cache()

    def _error(self, failure: torch.OutOfMemoryError, plan: Plan, half: str, *, undone: bool) -> StepMemoryError:
        rows = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in plan.planned.rows[:_ROWS])
        state = (
            "gradients, buffers and random numbers are as they were before the call"
            if undone
            else "gradients of earlier calls, buffers or inputs were written to and cannot be restored: begin the "
            "effective batch again after zero_grad()"
        )
        return StepMemoryError(
            f"an allocation failed in the {half} of {type(self.model).__name__}, whose step is planned to hold "
            f"{size(plan.predicted_peak_bytes)} of a budget of {size(plan.budget_bytes)} (at {plan.planned.at}: "
            f"{rows}); {state}; later steps are planned with {size(self.accounts.unforeseen_bytes)} of the budget left "
            f"free; the device says: {' '.join(str(failure).split())}",
            undone=undone,
        )
