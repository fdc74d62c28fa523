"""A dry run of a training call whose forward breaks into regions: records which regions run, in what order, and the
bytes that the eager code between them holds. No operator of a region makes those, and the budget has to have room for
them."""

from __future__ import annotations

import inspect
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.captured_call import CapturedCall, EagerCodeBytes, Passed, RegionRun, together
from memopt.capture.data_sizes import Observed, is_real, observing
from memopt.capture.dynamo import Backend, GraphBreak, in_brief_with_line, may_run_other_regions, short_path
from memopt.capture.dynamo_graph import forward_of, result_values
from memopt.capture.inner_outputs import CrossedByDerivative, InnerOutputs
from memopt.capture.region import RecordedRegion
from memopt.compat.autograd import has_node
from memopt.compat.fakes import device_type_of
from memopt.compat.fsdp import NOTHING_GATHERED, Gathered
from memopt.compat.hooks import hooks_left_out, hooks_to_come
from memopt.compat.modules import without_backward_hooks
from memopt.compat.operators import tree_leaves, tree_map
from memopt.compat.tensors import is_wrapper, storage_key
from memopt.device.live_bytes import LiveBytes
from memopt.device.op_call import describe, tensors_in
from memopt.device.workspace import eager_workspace_bytes
from memopt.errors import CaptureError


class DryRun:
    """Records the runs of regions while a call's Python code runs once.

    Each region runs as one opaque function, forward and backward. Its outputs are computed by Dynamo's graph without
    gradients, or by the function `forward_of(region)` if that is given: a plan may compute other values than Dynamo's
    graph, and the model's Python code may branch on them. The gradients of its inputs have arbitrary values. Operators
    between regions run as they are.

    `real_ids` is as for `RecordedRegion.record`, `gathered` and `most_bytes` are as for `Between`."""

    def __init__(
        self,
        real_ids: Mapping[int, int] | None = None,
        forward_of: Callable[[RecordedRegion], Callable[..., Any]] | None = None,
        gathered: Gathered = NOTHING_GATHERED,
        most_bytes: float = math.inf,
    ) -> None:
        self.real_ids, self.forward_of = real_ids, forward_of
        self.between = Between(gathered, most_bytes)
        self.runs: list[RegionRun] = []
        self._passed: list[Passed] = []
        """For each run, the values that it exchanges with other code; how long its outputs are held is added later."""
        self._memory: list[dict[int, Any]] = []
        """For each run, by the position of each output with memory of its own, a weak reference to that memory."""
        self._held_in: list[dict[int, int]] = []
        """For each run, by the same positions, the last run that began while the output was held; at first itself."""
        self._inner: list[InnerOutputs] = []
        self._hooks: list[dict[int, Any]] = []
        """The tables of the hooks that the model's code adds to outputs."""

    def run(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> Any:
        """Run a region on its inputs and return its outputs. The run is recorded if an output requires a gradient."""
        if not region.differentiable:
            return region.graph_module(*inputs)
        run = RegionRun.of(region, inputs, self.real_ids)
        with self.between.planned():
            forward = self.forward_of(region) if self.forward_of else forward_of(region.graph_module)
        given = [value for value in inputs if isinstance(value, torch.Tensor)]
        observed: list[Observed] = []
        with observing(observed) if region.depends_on_data and all(map(is_real, given)) else nullcontext():
            outputs = stand_in(region.graph_module, forward, self.between, self.between.begin_run(), inputs)
        if region.feeds and region.deferred is None:
            self._inner.append(InnerOutputs(outputs, region.feeds))
        for value in filter(has_node, outputs):
            self._hooks.append(hooks_to_come(value))
        self.runs.append(replace(run, observed=tuple(observed)))
        passed_on = frozenset(number for number, value in enumerate(inputs) if self.between.passes_on(value))
        self._passed.append(Passed(gradients=passed_on, given=self._given(inputs)))
        memory = {position: _weak_storage(value, given) for position, value in enumerate(outputs)}
        self._memory.append({position: weak for position, weak in memory.items() if weak is not None})
        self._held_in.append(dict.fromkeys(self._memory[-1], len(self._memory) - 1))
        return outputs

    def _given(self, inputs: Sequence[Any]) -> dict[int, tuple[int, int]]:
        """`Passed.given` of a run that begins with these inputs. Also notes which earlier outputs are held now."""
        made: dict[int, tuple[int, int]] = {}
        for run, memory in enumerate(self._memory):
            for position, weak in memory.items():
                if (storage := weak()) is not None:
                    self._held_in[run][position] = len(self._memory)
                    made[id(storage)] = run, position
        storages = {at: id(value.untyped_storage()) for at, value in enumerate(inputs) if _has_memory(value)}
        return {at: made[storage] for at, storage in storages.items() if storage in made}

    def remove_hooks(self) -> None:
        """Remove the hooks that the model's code has added to outputs of regions: one that refers to another output of
        its region would keep both, and what they were computed from, in memory."""
        for table in self._hooks:
            table.clear()

    def captured(self, outputs: Any, parameters: Iterable[torch.Tensor], reason: str) -> CapturedCall:
        """The captured call, which has returned `outputs`; `reason` says why it is not one region. Runs the backward
        from them to `parameters`, to count what eager code holds meanwhile. No `.grad` changes and no hook on a
        parameter's gradient runs, except that FSDP2 sets `.grad` of gathered parameters."""
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        self.between.raise_peak(0)
        held, returning = self.between.live_bytes, self.between.peak_bytes
        gone_early = dict(enumerate(self._gone()))
        eager = self._differentiate(tensors, [one for one in parameters if one.requires_grad])  # may run regions again
        passed = [
            replace(one, outputs=gone, forward_only={at: self._held_in[run][at] for at in gone_early.get(run, ())})
            for run, (one, gone) in enumerate(zip(self._passed, self._gone(), strict=True))
        ]
        around = zip(self.runs, self.between.runs, passed, strict=True)
        return CapturedCall(
            tuple(replace(run, eager=bytes_around, passed=shared) for run, bytes_around, shared in around),
            reason,
            EagerCodeBytes(before=self.between.peak_bytes, during=held, before_backward=returning),
            returned_bytes=_known_bytes(tensors),
            eager=eager,
        )

    def _gone(self) -> list[frozenset[int]]:
        """For each run, the positions of the outputs that nobody holds now."""
        return [frozenset(at for at, weak in memory.items() if weak() is None) for memory in self._memory]

    def _differentiate(self, outputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> frozenset[int]:
        """Run the backward; returns the `id`s of the parameters that get gradients from operators between regions."""
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        scalars = [root for root in roots if root.dim() == 0] or roots
        with self.between.planned():
            gradients = [torch.ones_like(scalar) for scalar in scalars]
        if self.between.gathered:
            torch.autograd.backward(scalars, gradients)
            return frozenset(id(parameter) for parameter in parameters if parameter.grad is not None)
        if not parameters:
            return frozenset()
        pairs = zip(parameters, torch.autograd.grad(scalars, parameters, gradients, allow_unused=True), strict=True)
        known = self.real_ids or {}
        return frozenset(known.get(id(one), id(one)) for one, gradient in pairs if gradient is not None)


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _known_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the memory of tensors; on fakes without those whose size depends on values."""
    storages = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if _has_memory(tensor)}
    return sum(nbytes for nbytes in storages.values() if isinstance(nbytes, int))


def _weak_storage(value: Any, inputs: Sequence[torch.Tensor]) -> Any:
    """A weak reference to the memory of an output; None where it is no tensor, or lies in the memory of an input."""
    if not isinstance(value, torch.Tensor):
        return None
    storage = value.untyped_storage()
    own = all(given.untyped_storage() is not storage for given in inputs)
    return weakref.ref(storage) if own else None


def record_dry_run(
    run: Callable[[], Any],
    dry_run: DryRun,
    model: nn.Module,
    reason: str,
    mode: AbstractContextManager[Any] | None = None,
) -> CapturedCall:
    """Capture the regions that a call of `model` runs through, by calling `run()` once, which must run each region by
    `dry_run.run`.

    The user's backward hooks are not called, since gradients have arbitrary values here, and no gradient is left. The
    text `reason` says why the call is not one region; `mode` is the fake mode to run in, if any. Raises `CaptureError`
    where the run cannot be captured, fails on fake tensors or in its backward, or contains no region. Other errors of
    the model's forward on real values, and failed allocations, are raised unchanged."""
    from memopt.compat.dynamo import DynamoError  # loads torch._dynamo

    parameters = list(model.parameters())  # read now, since FSDP2 replaces them by gathered ones during the forward
    in_forward = True
    try:
        own = without_backward_hooks(model), without_gradients(model)  # a node's backward may run others by itself
        with own[0], own[1], mode or nullcontext(), dry_run.between:
            outputs = run()
            in_forward = False
            captured = dry_run.captured(outputs, parameters, reason)
            del outputs  # held until here, as the caller may hold them to the step's end
    except Exception as failure:
        known = isinstance(failure, (DynamoError, CrossedByDerivative, GraphBreak))
        too_large = isinstance(failure, (EagerCodeTooLargeError, MemoryError, torch.OutOfMemoryError))
        if mode is None and not known and (in_forward or too_large):
            raise
        error = in_brief_with_line(failure)
        where = "running the rest of the forward on fake tensors" if mode else "running the rest of the forward"
        reasons = reason if error == reason or str(failure) == reason else f"{reason}; {where} failed: {error}"
        if isinstance(failure, CrossedByDerivative):
            reasons = f"{reason}, and it {failure}"
        raise CaptureError(cannot_capture(model, reasons)) from failure
    finally:
        dry_run.remove_hooks()
    if not captured.runs:
        raise CaptureError(cannot_capture(model, reason, _NOTHING_CAPTURED))
    return captured


def cut_off(call: Any) -> Any:
    """The arguments of a call, with each tensor that has a `grad_fn` replaced by a non-leaf tensor that shares its
    memory and has no autograd history. So the backward of a dry run does not continue into an earlier forward, whose
    saved values it would free."""
    if not any(map(has_node, tree_leaves(call))):
        return call
    cut: Any = _CutOff.apply
    return tree_map(lambda one: cut(one.detach().requires_grad_()) if has_node(one) else one, call)


class _CutOff(torch.autograd.Function):
    """The identity; autograd does not take its result for a view."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def as_run_later(capture: Callable[[], CapturedCall], backend: Backend) -> CapturedCall:
    """Capture a call with the regions that its later runs will go through.

    Where Dynamo may choose other compilations the next time, `capture` is called twice. If the second capture has other
    regions, the second is returned. If it has the same regions, each size and each count of eager bytes is the larger
    one of both captures, since a model may keep a value of its first call and hold more in the second.

    `backend` recorded the regions. The model must be in the same state before and after `capture`."""
    found = capture()
    if not may_run_other_regions(backend):
        return found
    again = capture()
    return again if again.places != found.places else together(found, again, margin=1.0)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """A context in which parameters have no gradients; those that they had are restored after it."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


_NOTHING_CAPTURED = (
    ", and torch.compile captures nothing of a function with such a line in a loop: move the loop into its own function"
)
RUN_UNPLANNED = "change the model there, or add 'plain' to allow to run it unplanned"
"""The mend that the message of a `CaptureError` ends with; the command line, which runs nothing, names another."""


def cannot_capture(model: nn.Module, reason: str, further: str = "") -> str:
    """The message for users that the forward of `model` cannot be captured, because of `reason`. The first line of the
    forward is added if `reason` names no line of code; then follow `further` and what the user can do."""
    if "storage of Sparse" in reason:
        reason = f"it makes a sparse tensor, such as the gradient of an embedding with sparse=True ({reason})"
    code: Any = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is not None and not re.search(r":\d+, in ", reason):
        reason += f" ({short_path(code.co_filename)}:{code.co_firstlineno}, in {code.co_name})"
    return f"the forward of {type(model).__name__} cannot be captured as a graph: {reason}{further}; {RUN_UNPLANNED}"


class EagerCodeTooLargeError(CaptureError):
    """Raised where eager code between regions holds more bytes than the budget leaves for it."""


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
