"""The bytes that eager code between captured regions holds: no operator of a region makes them, and the budget has to
have room for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import result_values
from memopt.compat.fakes import device_type_of
from memopt.compat.fsdp import NOTHING_GATHERED, Gathered
from memopt.compat.hooks import hooks_left_out
from memopt.compat.tensors import is_wrapper
from memopt.device.live_bytes import LiveBytes
from memopt.device.op_call import describe, tensors_in
from memopt.device.workspace import eager_workspace_bytes
from memopt.errors import CaptureError


@dataclass(frozen=True)
class EagerCodeBytes:
    """The bytes that eager code before, during and after one run of a region holds."""

    before: int = 0
    """The most held between the previous run of a region, or the beginning of the forward, and this one."""
    during: int = 0
    """Held while the region's forward runs."""
    before_backward: int = 0
    """The most held between the previous forward or backward of any region and this run's backward."""
    during_backward: int = 0
    """Held while its backward runs."""

    def __or__(self, other: EagerCodeBytes) -> EagerCodeBytes:
        """The larger number of bytes of each kind."""
        return EagerCodeBytes(*map(max, astuple(self), astuple(other)))

    def scaled(self, factor: float) -> EagerCodeBytes:
        """A copy with each of its byte counts multiplied by `factor` and rounded up."""
        return EagerCodeBytes(*(math.ceil(factor * nbytes) for nbytes in astuple(self)))


class EagerCodeTooLargeError(CaptureError):
    """Raised where eager code between regions holds more bytes than the budget leaves for it."""


class CrossedByDerivative(CaptureError):
    """Raised where eager code needs a derivative through a region that the region's backward cannot give: gradients of
    gradients (`create_graph=True`), or the gradient of an output from which the region computes other outputs. The
    message is how a refusal goes on after the reason for a graph break and "and it"."""


@dataclass(frozen=True)
class Passed:
    """Which tensors of one run of a region come from or go to other code (eager code, other regions): outputs and
    gradients of inputs, if they are freed before the step ends, and inputs that are outputs of an earlier region."""

    outputs: frozenset[int] = frozenset()
    """Positions of outputs that nobody holds any more once the region's backward begins."""
    gradients: frozenset[int] = frozenset()
    """Numbers of the inputs whose gradients other code takes: inputs that other code computed, and parameters that
    FSDP2 has gathered."""
    forward_only: Mapping[int, int] = field(default_factory=dict)
    """Position of an output, one of `outputs`, that nobody holds once the call's forward is over, unless the backward
    of a region reads it → the number of the last run of a region that began while it was held."""
    given: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Number of an input that lies in the memory of an earlier run's output → that run and the output's position."""

    def __and__(self, other: Passed) -> Passed:
        """What holds in both of two captures. References to other runs by number are dropped, as the numbers may
        differ: outputs then count as held until the region's backward begins."""
        return Passed(self.outputs & other.outputs, self.gradients & other.gradients)

    def without_runs(self) -> Passed:
        """A copy without the fields that refer to other runs by number."""
        return Passed(self.outputs, self.gradients)


class Between(LiveBytes):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts the bytes of eager code between regions: storages made outside of `planned()` blocks,
    and the parameters in `gathered` while FSDP2 holds them. Raises `EagerCodeTooLargeError` above `most_bytes`."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, as Dynamo captures nothing while a dispatch mode is active for which this returns False."""
        return True

    def __init__(self, gathered: Gathered = NOTHING_GATHERED, most_bytes: float = math.inf) -> None:
        super().__init__()
        self.gathered, self.most_bytes = gathered, most_bytes
        self._waiting_bytes = 0
        self._planned = 0
        self.runs: list[EagerCodeBytes] = []
        """For each run of a region that has begun, the bytes around it."""

    def begin_run(self) -> int:
        """Record that a run of a region begins; returns the run's number."""
        self.runs.append(EagerCodeBytes(self._peak_so_far(), self.live_bytes))
        return len(self.runs) - 1

    def begin_backward(self, number: int, gradients: Any) -> None:
        """Record that the backward of run `number` begins with `gradients`, those of its outputs. The gradients do not
        count as held by eager code, since the plan of the region includes them."""
        peak = self._peak_so_far()
        held = self.live_bytes - self.bytes_among(gradients)
        self.runs[number] = replace(self.runs[number], before_backward=peak, during_backward=held)

    def _peak_so_far(self) -> int:
        """The most bytes held since this was last asked."""
        self.raise_peak(0)
        peak, self.peak_bytes = self.peak_bytes, 0
        return peak

    @contextmanager
    def planned(self) -> Iterator[None]:
        """A context whose operators make storages that are part of a region's plan, and not counted here."""
        self._planned += 1
        try:
            yield
        finally:
            self._planned -= 1

    def raise_peak(self, workspace_bytes: int) -> None:
        """Raise the recorded peak to the bytes alive now plus `workspace_bytes`, if the sum is larger. Under FSDP2 the
        bytes alive include gathered parameters at the present size of their storages, which FSDP2 resizes to free them,
        and the unsharded gradients of earlier backwards, which are set aside while the step is counted.

        Raises `EagerCodeTooLargeError` where the bytes alive exceed `most_bytes`."""
        self.recount(self.gathered.memory())
        before, self._waiting_bytes = self._waiting_bytes, self.gathered.waiting_bytes
        self.live_bytes += self._waiting_bytes - before
        super().raise_peak(workspace_bytes)
        if self.live_bytes > self.most_bytes:
            raise EagerCodeTooLargeError(
                f"eager code between the regions of the forward holds {self.live_bytes:,} bytes, more than the "
                f"{self.most_bytes:,} that the budget leaves for it; give a larger budget or a smaller batch"
            )

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The bytes that the operator's kernel may hold besides its arguments and results; 0 in `planned()` blocks.
        They are an upper bound from a rule. On the CPU, where that bound would raise the peak, they are measured in one
        more run of the kernel, on made-up values: those of a dry run are arbitrary anyway."""
        tensors = list(tensors_in((result, args, list(kwargs.values()))))
        special = any(one.layout != torch.strided or is_wrapper(one) for one in tensors)
        if self._planned or func.is_view or not tensors or special:
            return 0
        call = describe(func, args, kwargs, result)
        return eager_workspace_bytes(call, device_type_of(tensors[0]), self.peak_bytes - self.live_bytes)

    def passes_on(self, value: Any) -> bool:
        """Whether other code takes the gradient of `value`, an input of a region: the eager code or region that
        computed the input, or FSDP2, which reduces the gradients of gathered parameters over ranks."""
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return False
        return not value.is_leaf or value in self.gathered

    def count(self, tensors: Any) -> None:
        """Count the storages of these tensors as `LiveBytes` does; in a `planned()` block, exclude them instead."""
        if self._planned:
            self.exclude(tensors)
        else:
            super().count(tensors)

    def count_state(self, state: torch.Tensor) -> None:
        """Count the state of a random generator as `LiveBytes` does, but not inside of `planned()` blocks."""
        if not self._planned:
            super().count_state(state)


def stand_in(
    region: fx.GraphModule, forward: Callable[..., Any], between: Between, number: int, arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run a region on `arguments` as one opaque autograd function, and return its outputs, which `forward` computes.
    `number` is what `between.begin_run()` returned for this run. Of all that the function's forward and backward
    allocate, `between` counts only the gradients that are passed on to other code."""
    run: Any = _StandIn.apply
    return run(region, forward, between, number, *arguments)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, region: fx.GraphModule, run: Callable[..., Any], between: Between, number: int, *arguments: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.between, ctx.number = between, number
        # A plan counts a region's inputs as held until its backward: those that eager code made are kept alive here.
        ctx.held = [argument for argument in arguments if between.has_counted(argument)]
        # Leaves that are not passed on get no gradient here: the plan of the region counts it.
        with between.planned():
            ctx.likes = [
                (torch.empty_like(argument, device="meta"), argument.device) if between.passes_on(argument) else None
                for argument in arguments
            ]
            with hooks_left_out():
                outputs = run(*arguments)
            # Detached, because autograd takes an output that is an input for one that was written over.
            results = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in outputs)
            # An output without a gradient in the model has none here either: later regions are captured as they run.
            known = zip(result_values(region), results, strict=True)
            constant = (of for one, of in known if isinstance(one, torch.Tensor) and not one.requires_grad)
            ctx.mark_non_differentiable(*constant)
            return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise CrossedByDerivative("takes a derivative through that break (create_graph=True)")
        ctx.between.begin_backward(ctx.number, gradients)
        ctx.held = None
        made = [like and torch.empty_like(like[0], device=like[1]) for like in ctx.likes]  # counted: it is passed on
        return None, None, None, None, *made
