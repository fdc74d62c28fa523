"""Undoes calls in which an allocation on the device failed, and runs them once more by a plan that holds less."""

from __future__ import annotations

import copyreg
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memopt.compat.autograd import stops_recomputation
from memopt.device.devices import device_of
from memopt.errors import BudgetError, CaptureError
from memopt.planning.plan import Plan
from memopt.run.entry import Entry
from memopt.training_state import CallState
from memopt.units import size


class StepMemoryError(torch.OutOfMemoryError):
    """Raised where the device has no memory left in a step that was planned to fit; a `torch.OutOfMemoryError`.

    Attributes:
        undone: whether gradients, buffers and random generators are as they were before the call.
        repeated: whether the call was tried once more, by a plan that holds less.
    """

    def __init__(self, message: str, *, undone: bool) -> None:
        super().__init__(message)
        self.undone, self.repeated = undone, False

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


_TIGHTER = 8
"""After a failed allocation, steps are planned to hold less than the failed one was to hold, by its bytes divided by
this."""
_ROWS = 6
"""The number of rows of the account that an error names."""


class SafetyNet:
    """Undoes training calls of one model in which an allocation failed, and plans later calls with a smaller budget.

    `plan_tighter`, called with a number of bytes, drops the plans; later plans leave that much of the budget free."""

    def __init__(self, entry: Entry, plan_tighter: Callable[[int], None]) -> None:
        self.model, self.entry, self.plan_tighter = entry.model, entry, plan_tighter
        self.unforeseen_bytes = 0
        """The bytes of the budget that are left free since allocations failed."""
        self.before: CallState | None = None
        """The state of the model before the running call."""
        self._latest_before: object = None
        """`Entry.latest` before the running call."""
        self._plain_bytes = 0
        """The bytes that the step of the latest plain call is counted to hold; 0 if the latest call was not plain."""

    def run(
        self,
        attempt: Callable[[CallState], Any],
        inputs: Iterable[torch.Tensor],
        *,
        repeat: bool,
        as_plain_fails: Callable[[Exception], Exception],
    ) -> Any:
        """Run a training call by `attempt`, which gets the state before the call; `inputs` are the call's tensors. With
        `repeat`, a call whose forward fails to allocate is undone and run once more by a plan that holds less; one
        that fails by an error of the model's own code is undone and raises what `as_plain_fails` returns for it.

        Raises `StepMemoryError` where no such plan works either, and where the call could not be undone."""
        self.before = before = CallState.of(self.model, inputs)
        self._latest_before, self._plain_bytes = self.entry.latest, 0
        try:
            try:
                return attempt(before)
            except torch.OutOfMemoryError as failure:
                failed = self._forward_failed(failure, before)
                if failed is None:
                    raise
            except (BudgetError, CaptureError):
                raise
            except Exception as error:
                if not repeat or stops_recomputation(error):
                    raise
                if (forward := self._begun()) is not None:
                    forward.after_backward()  # it gets no backward
                if not before.undo():
                    raise
                raise as_plain_fails(error) from None
            # Outside of the handler, since its exception would keep the forward's tensors alive.
            if not (failed.undone and repeat):
                raise failed
            return self._repeated(attempt, failed, before)
        finally:
            self.before = None

    def _repeated(self, attempt: Callable[[CallState], Any], failed: StepMemoryError, before: CallState) -> Any:
        failed.repeated = True
        try:
            return attempt(before)
        except BudgetError as refused:
            before.undo()
            raise failed from refused.with_traceback(None)
        except torch.OutOfMemoryError as failure:
            again = self._forward_failed(failure, before) or failed
            again.repeated = True
            raise again from None

    def _forward_failed(self, failure: torch.OutOfMemoryError, before: CallState) -> StepMemoryError | None:
        """Undo a forward in which an allocation failed, make later plans hold less, and return the error for the user.
        None where no forward had begun: memory ran out while the call was planned."""
        if (forward := self._begun()) is None:
            return None
        forward.after_backward()  # it gets no backward
        failure.with_traceback(None)  # its frames hold the forward's tensors
        return self._planned_failed(failure, forward.plan, "forward", undone=before.undo())

    def _begun(self) -> Any:
        """The planned forward that has begun in the running call; None where none has."""
        latest = self.entry.latest
        return None if latest is None or latest is self._latest_before else latest()

    def backward_failed(self, failure: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Undo the call in whose backward an allocation failed (gradients, buffers and random states), and plan later
        calls to hold less. Returns the `StepMemoryError` to raise, which says whether all was undone; `failure` itself,
        with nothing done, where no planned forward is in its backward."""
        forwards = self.entry.in_backward()
        if not forwards:
            return failure
        undone = [forward.undo() for forward in forwards]
        # Other forwards that this backward has not reached yet are not undone.
        undone_all = all(undone) and len(forwards) == 1
        return self._planned_failed(failure, forwards[0].plan, "backward", undone=undone_all)

    def run_plain(self, attempt: Callable[[], Any], inputs: Iterable[torch.Tensor], needed_bytes: int) -> Any:
        """Run a call without a plan by `attempt`; its step was counted to hold `needed_bytes`, and `inputs` are its
        tensors.

        Raises `StepMemoryError` if an allocation of its forward fails; calls like it are planned from then on. Random
        states are then as before the call, and so are buffers and inputs if the error's `undone` is True. It is False
        if one of them was written to, and for models with floating-point buffers: copying them takes time."""
        before, self._plain_bytes = CallState.of(self.model, inputs, copying=False), needed_bytes
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames hold the forward's tensors
        untouched = not any(one.is_floating_point() for one in self.model.buffers())  # not all kernels count writes
        raise self._plain_failed(failure, "forward", undone=before.undo() and untouched)

    def plain_backward_failed(self, failure: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Plan later calls to hold less, as an allocation failed in the backward of a plain call. Returns the
        `StepMemoryError` to raise; `failure` itself, with nothing done, where the latest call did not run plain."""
        return self._plain_failed(failure, "backward", undone=False) if self._plain_bytes else failure

    def _planned_failed(
        self, failure: torch.OutOfMemoryError, plan: Plan, half: str, *, undone: bool
    ) -> StepMemoryError:
        self._tighten(plan.ceiling_bytes - plan.account.unforeseen, plan.budget_bytes)
        rows = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in plan.planned.rows[:_ROWS])
        held = f"{size(plan.predicted_peak_bytes)} of a budget of {size(plan.budget_bytes)}"
        return self._error(failure, f"planned to hold {held} (at {plan.planned.at}: {rows})", half, undone=undone)

    def _plain_failed(self, failure: torch.OutOfMemoryError, half: str, *, undone: bool) -> StepMemoryError:
        needed, self._plain_bytes = self._plain_bytes, 0
        self._tighten(needed, self.entry.budget_bytes)
        counted = f"counted to hold {size(needed)} of a budget of {size(self.entry.budget_bytes)} without a plan"
        return self._error(failure, counted, half, undone=undone)

    def _tighten(self, held_bytes: int, budget_bytes: int) -> None:
        self.unforeseen_bytes = max(self.unforeseen_bytes, budget_bytes - tighter(held_bytes))
        self.plan_tighter(self.unforeseen_bytes)
        gc.collect()
        device_of(self.entry.device).empty_cache()

    def _error(self, failure: torch.OutOfMemoryError, held: str, half: str, *, undone: bool) -> StepMemoryError:
        state = (
            "gradients, buffers and random numbers are as they were before the call"
            if undone
            else "gradients of earlier calls, buffers or inputs were written to and cannot be restored: begin the "
            "effective batch again after zero_grad()"
        )
        return StepMemoryError(
            f"an allocation failed in the {half} of {type(self.model).__name__}, whose step is {held}; {state}; "
            f"later steps are planned with {size(self.unforeseen_bytes)} of the budget left "
            f"free; the device says: {' '.join(str(failure).split())}",
            undone=undone,
        )


def tighter(held_bytes: int) -> int:
    """The most bytes that steps may hold after an allocation failed in one that was planned to hold `held_bytes`."""
    return held_bytes - held_bytes // _TIGHTER


class GradientsBefore:
    """References to the gradients of parameters before a backward, and their versions: nothing is copied, as a backward
    adds to gradients in place."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [(one, one.grad) for one in parameters]
        self._missing = [one for one, grad in gradients if grad is None]
        self._there = [(one, weakref.ref(grad), grad._version) for one, grad in gradients if grad is not None]

    def undo(self) -> bool:
        """Set gradients that did not exist when this object was made to None. Returns whether all those that existed
        then are unchanged; changed ones are left as they are."""
        for parameter in self._missing:
            parameter.grad = None
        now = [(one.grad, before(), version) for one, before, version in self._there]
        return all(grad is not None and grad is before and grad._version == version for grad, before, version in now)
