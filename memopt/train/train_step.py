"""One training step, from a batch to the optimizers' step, with all operations in the right order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from memopt.account.optimizer_trial import parameters_of
from memopt.checks.compare_step import verify
from memopt.compat.ddp import unwrapped
from memopt.compat.operators import tree_leaves
from memopt.errors import BudgetError
from memopt.microbatch import as_microbatches
from memopt.planning.options import positive_int
from memopt.run.loss import batch_loss, has_loss_function
from memopt.run.safety_net import StepMemoryError
from memopt.run.session import session_of
from memopt.train.effective_batch import (
    Count,
    EffectiveBatch,
    Splitting,
    as_count,
    check_split,
    count_of,
    gradients_kept_here,
    is_parallel,
)
from memopt.train.optimizers import (
    as_optimizers,
    as_schedulers,
    check_proposals,
    clear,
    clip,
    multiply,
    norm_limit,
    with_gradients,
)
from memopt.train.scaling import FollowUp, Scaling, StepResult, check_autocast, check_scaler, scaler_for
from memopt.train.step_state import StateDict, restore, state_of
from memopt.training_state import CallState


class TrainStep:
    """`step(batch)` trains a plain or an optimised model on a batch: loss, backward, unscaling, clipping, optimizers,
    scale and schedulers, in this order.

    Args:
        model: returns its mean loss, or an object or a tuple with it, for a batch (a dict for keywords, a tuple for
            positional arguments). If it was optimised with a loss function, or a `loss_fn` is given, a batch is the
            pair `(inputs, targets)`. `DistributedDataParallel` around it exchanges gradients once per effective batch.
        optimizer: one or several; all of them step, or none.
        max_grad_norm: the limit to which the total norm of all gradients is clipped; None for no clipping.
        scheduler: one or several learning rate schedulers, stepped after each step of the optimizers.
        accumulate: the number of calls in one effective batch.
        scaler: a `torch.amp.GradScaler`. None: one where the forward is in fp16, else no scaling.
        loss_fn: for a plain model, `loss_fn(output, targets)`.
        microbatches: the number of equal pieces into which each batch is split. None: 1, or, for a model that was
            optimised with the lever "microbatch", as few as fit its budget where the whole batch does not.
        count: returns for a batch the number of terms in its mean loss, an int or a tensor: its weight in an effective
            batch. None: see `effective_batch.count_of`.
        verify_every: once in this many effective batches, before the batch begins, its first microbatch is also run by
            the plain model, from the same state, and `GradientMismatchError` is raised where the planned gradients
            differ by more than the plan's precision explains. That takes the plain step's memory, and the time of four
            steps.
        autocast: the dtype in which a plain model's forward runs, by `torch.autocast`. An optimised model has its own.

    A batch may also be a list or an iterator of microbatches of any sizes. The gradient is that of the mean over all
    tokens, however they are distributed over microbatches, calls and ranks. Batch statistics (BatchNorm) and losses
    that compare samples of a batch (contrastive ones) see one microbatch at a time.

    A step whose loss or gradients are not finite changes nothing but the scale, and `result.skipped` is True; the first
    time that the scale cannot be the cause, there is a warning. The host waits for the device only where a result is
    read. Where all optimizers are fused on CUDA, schedulers do not wait either: they step in the next call, or in
    `settle`.

    Bad input raises `TypeError` or `ValueError` and changes nothing. A call that fails later leaves gradients as they
    were; if it had already added to those of earlier calls, it leaves no gradients, and a new effective batch begins. A
    planned call in which an allocation fails is undone, buffers and random numbers too, and run once more by a plan
    that holds less; if it cannot be undone, or fails again, `StepMemoryError` is raised with the plan's account.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        max_grad_norm: float | None = 1.0,
        scheduler: Any = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        microbatches: int | None = None,
        count: Count | None = None,
        autocast: torch.dtype | None = None,
        verify_every: int | None = None,
    ) -> None:
        _check_functions(model, loss_fn=loss_fn, count=count)
        check_scaler(scaler)
        check_autocast(autocast, model)
        check_split(model)
        self.model, self.loss_fn, self.count, self.autocast = model, loss_fn, count, autocast
        self.optimizers = as_optimizers(optimizer, model, loss_fn)
        check_proposals(self.optimizers, model)
        self.schedulers = as_schedulers(scheduler, self.optimizers)
        self.max_grad_norm = norm_limit(max_grad_norm)
        self.accumulate = positive_int("accumulate", accumulate)
        self.splitting = Splitting(model, None if microbatches is None else positive_int("microbatches", microbatches))
        self.device = self.parameters[0].device
        self.scaling = Scaling(scaler or scaler_for(model, autocast), self.device)
        self.follow_up = FollowUp(self.schedulers, self.scaling.adapts)
        self.effective_batch = EffectiveBatch.empty(self.device)
        self.verify_every = None if verify_every is None else positive_int("verify_every", verify_every)
        if verify_every is not None and session_of(model) is None:
            raise ValueError(f"verify_every={verify_every} needs a model that memopt.optimize has optimised")
        self.number = 0
        """The number of complete effective batches, stepped or skipped."""
        self._touched = False

    def __call__(self, batch: Any) -> StepResult:
        microbatches = as_microbatches(batch, self.splitting.pieces(batch))
        repeated = False
        while True:
            try:
                return self._call(microbatches)
            except BudgetError as refused:  # nothing has run yet
                microbatches = as_microbatches(batch, self.splitting.more(batch, refused))
            except StepMemoryError as failed:  # later calls are planned to hold less
                failed.repeated = failed.repeated or repeated
                if failed.repeated or not failed.undone or is_parallel(self.model):
                    raise
                repeated = True

    def _call(self, microbatches: Sequence[Any]) -> StepResult:
        counts = self._counts(microbatches)
        if self.verify_every and self.number % self.verify_every == 0 and self.effective_batch.calls == 0:
            verify(self.model, microbatches[0])
        with self._undone_on_error(microbatches):
            self._backward(microbatches, counts)
            if self.effective_batch.calls < self.accumulate:
                return StepResult(self.effective_batch.mean_loss, self.scaling.current(self.device))
            result = self._finish()
        self.follow_up.take(self.number, result)
        return result

    def _backward(self, microbatches: Sequence[Any], counts: Sequence[torch.Tensor]) -> None:
        """Add the gradients of this call's microbatches, each weighted by its count."""
        batch = self.effective_batch.expecting(counts, self.accumulate, self.model)
        for number, (microbatch, count) in enumerate(zip(microbatches, counts, strict=True), start=1):
            last = number == len(microbatches) and batch.calls == self.accumulate
            with nullcontext() if last else gradients_kept_here(self.model):
                loss = batch.weighted(self._loss(microbatch), count)
                self._touched = True
                self.scaling.scale(loss).backward()  # type: ignore[no-untyped-call]
            batch = batch.plus(loss, count)
        self.effective_batch = batch

    def _finish(self) -> StepResult:
        """Complete the effective batch: step the optimizers if the loss and all gradients are finite."""
        self.follow_up.settle()
        batch = self.effective_batch.over_ranks(self.model)
        optimizers = with_gradients(self.optimizers)
        scale = self.scaling.current(self.device)
        skipped = self.scaling.unscale(optimizers, torch.isfinite(batch.mean_loss))
        if self.accumulate > 1:  # within one call the reference is exact
            multiply(self.parameters, batch.correction)
        norm = clip(self.parameters, self.max_grad_norm)
        verdict = self.scaling.step(optimizers, skipped)
        self.scaling.update()
        self._clear()
        self.number += 1
        return StepResult(batch.mean_loss, scale, norm, verdict)

    def settle(self) -> None:
        """Step the schedulers for the latest complete effective batch, unless that was done or the optimizers skipped
        it. The end of an effective batch settles the one before it, so call this once, after the last one."""
        self.follow_up.settle()

    def state_dict(self) -> StateDict:
        """The state between two calls, also within an effective batch: with it and the model's own state dict a run
        resumes bitwise as if it had never stopped.

        It has the states of optimizers, schedulers and scaler, the gradients summed in an effective batch that is not
        complete, the number of complete ones, and the states of Python's, numpy's and torch's random generators.
        `torch.load(weights_only=True)` can read it. Tensors are not copied: save or copy them before the next call.
        Under DDP each rank has a state of its own.
        """
        self.settle()
        return state_of(self)

    def load_state_dict(self, state: StateDict) -> None:
        """Restore `state`; call this last, after the model's `load_state_dict`, since it sets the random generators.

        Raises `ValueError`, before anything is changed, where `state` was saved by a TrainStep with other arguments."""
        restore(self, state)
        self.follow_up.forget()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers."""
        return parameters_of(*self.optimizers)

    def _counts(self, microbatches: Sequence[Any]) -> list[torch.Tensor]:
        """The weight of each microbatch. Where the effective batch is a single microbatch on one rank, nothing is
        counted, and the weight is 1."""
        if len(microbatches) == self.accumulate == 1 and not is_parallel(self.model):
            return [as_count(1, self.effective_batch)]
        pairs = has_loss_function(self.model, self.loss_fn)
        counts = [count_of(microbatch, self.model, self.count, with_targets=pairs) for microbatch in microbatches]
        return [as_count(count, self.effective_batch) for count in counts]

    def _loss(self, batch: Any) -> torch.Tensor:
        self.scaling.check_ambient_autocast(self.device)
        if self.autocast is None:
            return batch_loss(self.model, batch, self.loss_fn).to(self.device)
        check_autocast(self.autocast, self.model)
        with torch.autocast(self.device.type, dtype=self.autocast):
            return batch_loss(self.model, batch, self.loss_fn).to(self.device)

    def _clear(self) -> None:
        clear(self.parameters)
        self.effective_batch = EffectiveBatch.empty(self.device)

    @contextmanager
    def _undone_on_error(self, microbatches: Sequence[Any]) -> Iterator[None]:
        """A context that leaves gradients unchanged if it fails; if it has already added to those of earlier calls, it
        leaves none."""
        earlier, first = self.effective_batch, self.effective_batch.calls == 0
        held = [(parameter, parameter.grad) for parameter in self.parameters]
        self._touched = False
        inputs = [leaf for leaf in tree_leaves(microbatches) if isinstance(leaf, torch.Tensor)]
        state = CallState.of(unwrapped(self.model), inputs) if session_of(self.model) is not None else None
        if first:
            clear(self.parameters)
        try:
            yield
        except BaseException as error:
            failure, session = error, session_of(self.model)
            if isinstance(error, torch.OutOfMemoryError) and session is not None and self._touched:
                failure = session.backward_failed(error)
            if isinstance(failure, StepMemoryError) and state is not None:
                failure.undone = state.undo() and first
            self.scaling.forget()
            if self._touched:
                self._clear()
            if first or not self._touched:
                self.effective_batch = earlier
                for parameter, gradient in held:
                    parameter.grad = gradient
            if failure is not error:
                raise failure from None
            raise


def _check_functions(model: nn.Module, **functions: Any) -> None:
    """Raise `TypeError` unless the model is a module and the functions are None or callable."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a function, not {function!r}")
