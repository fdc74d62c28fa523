"""What begins a call once more: where the device has no memory left, and for gradients that the plan does not have."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from memopt.capture.inner_outputs import TensorKind, run_from
from memopt.capture.region import RecordedRegion
from memopt.compat.modules import modules_of, parameters_in
from memopt.device.devices import device_of
from memopt.errors import BudgetError, UnplannedGradientError
from memopt.planning.plan import Plan
from memopt.run.entry import Entry
from memopt.run.on_demand import Later
from memopt.training_state import CallState, generator_states, set_generators
from memopt.units import size


class StepMemoryError(torch.OutOfMemoryError):
    """The device had no memory left in a step that was planned to fit; also a `torch.OutOfMemoryError`.

    Attributes:
        undone: whether gradients, buffers and random generators are as they were before the call.
        repeated: whether the call was tried once more by a tighter plan.
    """

    def __init__(self, message: str, *, undone: bool) -> None:
        super().__init__(message)
        self.undone, self.repeated = undone, False


_TIGHTER = 8
"""After a failed allocation, steps are planned to hold at most all but this part of what the failed one was to hold."""
_ROWS = 6
"""The number of rows of the account that an error names."""


class SafetyNet:
    """Undoes training calls of one model in which an allocation failed, and has later calls planned tighter.

    `plan_tighter` has calls planned anew with so many bytes of the budget left free.
    """

    def __init__(self, model: nn.Module, entry: Entry, plan_tighter: Callable[[int], None]) -> None:
        self.model, self.entry, self.plan_tighter = model, entry, plan_tighter
        self.unforeseen_bytes = 0
        """The bytes of the budget that are left free since allocations failed."""
        self.before: CallState | None = None
        """The state of the model before the call that runs."""
        self._forwards_before = 0
        """The number of forwards that had begun before the call that runs."""
        self._plain_bytes = 0
        """The bytes that the step of the latest call is counted to hold, where that ran plain."""

    def run(self, attempt: Callable[[CallState], Any], inputs: Iterable[torch.Tensor], *, repeat: bool) -> Any:
        """Run a training call with these tensors by `attempt`, which is given the state before it; with `repeat` a
        second time, by a tighter plan, if an allocation of its forward fails.

        Raises `StepMemoryError` where no tighter plan works either, and where the call could not be undone.
        """
        before, self._forwards_before = CallState.of(self.model, inputs), self.entry.begun
        self._plain_bytes = 0
        self.before = before
        try:
            try:
                return attempt(before)
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
        """Undo a forward in which an allocation failed, and plan tighter; the error for the user. None where no forward
        had begun: memory ran out while the call was planned."""
        forward = self.entry.latest() if self.entry.latest else None
        if self.entry.begun == self._forwards_before or forward is None:
            return None
        forward.after_backward()  # it will have none
        failure.with_traceback(None)  # its frames hold what the forward made
        undone = before.undo()
        self._tighten(*_held_by(forward.plan))
        return self._error(failure, _by_plan(forward.plan), "forward", undone=undone)

    def backward_failed(self, failure: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Undo the call in whose backward an allocation failed, and plan tighter; the error for the user."""
        forwards = self.entry.in_backward()
        if not forwards:
            return failure
        undone = [forward.undo() for forward in forwards]
        plan = forwards[0].plan
        self._tighten(*_held_by(plan))
        # Of several forwards, those that the backward has not come to yet are still there.
        return self._error(failure, _by_plan(plan), "backward", undone=all(undone) and len(forwards) == 1)

    def run_plain(self, attempt: Callable[[], Any], inputs: Iterable[torch.Tensor], needed_bytes: int) -> Any:
        """Run a call with these tensors as the plain model does by `attempt`, whose step is counted to hold that many
        bytes.

        Raises `StepMemoryError` if an allocation of its forward fails: calls like it are planned from then on. It is
        undone where it can have written to no buffer: to keep copies in each call would take time.
        """
        before, self._plain_bytes = CallState.of(self.model, inputs, copying=False), needed_bytes
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)  # its frames hold what the forward made
        untouched = not any(one.is_floating_point() for one in self.model.buffers())  # not all kernels count writes
        raise self._plain_failed(failure, "forward", undone=before.undo() and untouched)

    def plain_backward_failed(self, failure: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Have calls planned tighter after the backward of a call that ran plain has failed; the error for the user."""
        return self._plain_failed(failure, "backward", undone=False) if self._plain_bytes else failure

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
    """The most bytes that steps are to hold after an allocation has failed in one that was to hold `held_bytes`."""
    return held_bytes - held_bytes // _TIGHTER


def _held_by(plan: Plan) -> tuple[int, int]:
    """The bytes that a plan was to hold, and those of its budget."""
    return plan.ceiling_bytes - plan.account.unforeseen, plan.budget_bytes


def _by_plan(plan: Plan) -> str:
    """What a plan was to hold, in words."""
    rows = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in plan.planned.rows[:_ROWS])
    held = f"{size(plan.predicted_peak_bytes)} of a budget of {size(plan.budget_bytes)}"
    return f"planned to hold {held} (at {plan.planned.at}: {rows})"


@dataclass(frozen=True, eq=False)
class GradientsBefore:
    """The gradients of a model before a backward, which are not copied: a backward adds to them in place."""

    parameters: tuple[tuple[nn.Parameter, weakref.ref[torch.Tensor] | None, int], ...]
    """Each parameter with its gradient and that gradient's version."""

    @classmethod
    def of(cls, model: nn.Module) -> GradientsBefore:
        """The present gradients."""
        gradients = [(parameter, parameter.grad) for parameter in parameters_in(modules_of(model))]
        return cls(
            tuple(
                [(one, None, 0) if grad is None else (one, weakref.ref(grad), grad._version) for one, grad in gradients]
            )
        )

    def undo(self) -> bool:
        """Drop the gradients that appeared since; returns False where those that were there have changed."""
        for parameter, before, _ in self.parameters:
            if before is None:
                parameter.grad = None
        return all(
            before is None
            or (parameter.grad is not None and before() is parameter.grad and parameter.grad._version == version)
            for parameter, before, version in self.parameters
        )


class _Exceeded(Protocol):
    """A forward whose backward has not run yet."""

    def replayed(self) -> None:
        """Called once a second forward has run beside the plan of its backward."""


class Replay:
    """The second forward of one call, from the state in which the first one began.

    `before` is that state; `prevented` says why the gradients of a second forward would not do, if so; `noted` is
    called once they were needed.
    """

    def __init__(
        self,
        region: RecordedRegion,
        inputs: Sequence[Any],
        forward: _Exceeded,
        before: CallState | None,
        prevented: str,
        noted: Callable[[], None],
    ) -> None:
        self.region, self.forward, self.noted = region, forward, noted
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._versions = [value._version if isinstance(value, torch.Tensor) else 0 for value in inputs]
        copies = before.values.copies() if before else {}
        self._copies = {number: copies[id(value)] for number, value in enumerate(inputs) if id(value) in copies}
        unknown = any(number not in self._copies for number in region.written)
        self.prevented = prevented or ("the forward writes to a large buffer or an input" if unknown else "")
        self.inputs: Sequence[Any] | None = None if self.prevented else inputs
        self.leaves: Sequence[torch.Tensor] = () if self.prevented else [one for one in tensors if one.requires_grad]
        self.device = tensors[0].device
        self.generators = generator_states(self.device)
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def release(self) -> None:
        """Free what the second forward needs."""
        self.inputs, self.leaves, self._copies = None, (), {}

    def gradients(self, of: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients of `leaves` for these gradients of outputs, by position.

        Raises `UnplannedGradientError` where no second forward gives them.
        """
        shape = tuple(next(iter(of.values())).shape)
        what = f"a gradient flows into an output of shape {shape}, but the plan differentiates only the loss"
        mend = "optimise with outputs='all' to plan for the gradients of all outputs"
        self._check(what, mend)
        arguments = self._arguments(require_grad=True)
        with self._as_before():
            assert self.region.plain is not None
            outputs = self.region.plain(*arguments)
        leaves = [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad]
        found = _gradients_of(outputs, of, leaves)
        self.noted()
        self.forward.replayed()
        warnings.warn(
            f"{what}; that gradient is computed by a second run of the plain forward, beside the budget, and from the "
            f"next call on all outputs are planned for; {mend} from the first call on",
            stacklevel=2,
        )
        return found

    def gradient_by(
        self, position: int, kind: TensorKind, given: Mapping[int, torch.Tensor], own: torch.Tensor | None
    ) -> torch.Tensor:
        """The gradient, a tensor of this kind, of the output at `position`: `own`, and what comes to it through others
        with the gradients `given`, by position. It is computed by a second forward when it is first looked at, which
        raises `UnplannedGradientError` where that cannot be."""
        strides = torch.empty(kind.shape, device="meta").stride()
        all_given = given if own is None else {position: own, **given}
        return _InnerGradient(self, position, kind, all_given).on_demand(
            0, kind.shape, strides, kind.dtype, kind.device
        )

    def gradient_at(self, position: int, kind: TensorKind, given: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The gradient that `gradient_by` stands for; `given` has that of the output itself, too."""
        what = (
            "a hook, retain_grad() or torch.autograd.grad() reads the gradient of an output of shape "
            f"{tuple(kind.shape)}, from which the model computes others, and the plan does not have that gradient"
        )
        self._check(what, "return that output alone and compute the others from it outside of the model")
        # Those that parameters get are not needed again, unless the model's own derivatives go by them.
        arguments = self._arguments(require_grad=self.region.takes_derivatives)
        with self._as_before():
            assert self.region.plain is not None
            outputs, leaf = run_from(self.region.plain, position, arguments)
        (found,) = _gradients_of(outputs, given, [leaf])
        assert found is not None
        self.forward.replayed()
        warnings.warn(f"{what}; it is computed by a second run of the plain forward, beside the budget", stacklevel=2)
        return found

    def _check(self, what: str, mend: str) -> None:
        if prevented := self.prevented or self._changed():
            raise UnplannedGradientError(f"{what}, and {prevented}; {mend}")

    def _changed(self) -> str:
        """Says so if the first backward is over, or the inputs are not as they were."""
        if self.inputs is None:
            return "its forward was differentiated before without retain_graph=True"
        read = (number for number in range(len(self.inputs)) if number not in self._copies)
        tensors = ((number, self.inputs[number]) for number in read)
        same = (not isinstance(one, torch.Tensor) or one._version == self._versions[number] for number, one in tensors)
        return "" if all(same) else "the weights or inputs have changed since its forward"

    def _arguments(self, require_grad: bool) -> list[Any]:
        """The inputs as they were, apart from their autograd graphs."""
        assert self.inputs is not None
        arguments = list(self.inputs)
        for number, value in enumerate(arguments):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                arguments[number] = value.detach().requires_grad_(require_grad)
            elif (kept := self._copies.get(number)) is not None:
                arguments[number] = kept.clone()
        return arguments

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """A context with the random generators and the autocast of the first forward."""
        now, (enabled, dtype) = generator_states(self.device), self.autocast
        try:
            set_generators(self.generators, self.device)
            with torch.enable_grad(), torch.autocast(self.device.type, dtype, enabled=enabled, cache_enabled=False):
                yield
        finally:
            set_generators(now, self.device)


def _gradients_of(
    outputs: Sequence[torch.Tensor], given: Mapping[int, torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """The gradients of `leaves` for these gradients of outputs, by position, which may have other dtypes."""
    results = [outputs[position] for position in given]
    gradients = [gradient.to(result.dtype) for gradient, result in zip(given.values(), results, strict=True)]
    return torch.autograd.grad(results, leaves, gradients, allow_unused=True)


class _InnerGradient(Later):
    """The gradient of an output from which others are computed."""

    def __init__(self, replay: Replay, position: int, kind: TensorKind, given: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.replay, self.position, self.kind, self.given = replay, position, kind, given

    def compute(self) -> None:
        self.hand_over([self.replay.gradient_at(self.position, self.kind, self.given).to(self.kind.dtype)])
