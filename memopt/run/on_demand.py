"""Outputs on demand: tensors with the sizes of a model's outputs, which are computed when they are first read."""

from __future__ import annotations

import copy
import inspect
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from memopt.capture.outputs import Group, Piece
from memopt.capture.region import RecordedRegion
from memopt.compat.operators import tree_leaves, tree_map
from memopt.compat.symbols import symbol_values, with_values
from memopt.compat.tensors import NEED_MEMORY, READ_NO_VALUES, as_implemented, wrapper_tensor
from memopt.errors import StaleOutputError
from memopt.run.pending import PendingForward
from memopt.run.second_run import as_before
from memopt.saved_values import generator_states
from memopt.training_state import CallState, generators_before
from memopt.units import size
from passes.ops.offload_ops import bring

aten = torch.ops.aten
_MAY_RETURN_ITSELF = frozenset(
    getattr(torch.Tensor, name)
    for name in ("bfloat16", "contiguous", "cpu", "cuda", "double", "float", "half", "to", "type", "type_as")
)
_DDP = "torch.nn.parallel.distributed"


class Notice:
    """Warns once per model that an output was computed on demand."""

    def __init__(self) -> None:
        self.said = False

    def say(self, results: Sequence[torch.Tensor], *, again: bool) -> None:
        """Warn, the first time, that these outputs were read and had to be computed outside of the plan; `again`: by a
        second run of the forward."""
        if self.said:
            return
        self.said = True
        nbytes = sum(result.numel() * result.element_size() for result in results)
        how = "by a second run of the forward" if again else "from the forward's last values"
        warnings.warn(
            f"an output of the model was read that the plan does not hold: {size(nbytes)} (the first of shape "
            f"{tuple(results[0].shape)}) are computed {how}, in memory outside of the budget; to plan for all "
            "outputs, give optimize outputs='all' (this warning comes once)",
            stacklevel=2,
        )


def run_deferring(
    region: RecordedRegion,
    run: Callable[..., Sequence[Any]],
    inputs: tuple[Any, ...],
    notice: Notice,
    forward: PendingForward,
    before: CallState | None,
) -> Sequence[Any]:
    """Run a region by `run` and return the outputs of the model's call. Outputs that the region defers are computed
    when they are first read; values kept for that are freed when the backward of `forward` begins. `before` has the
    states of the random generators before the region; where it is None, they are read now."""
    deferred = region.deferred
    if deferred is None:
        return run(*inputs)
    device = deferred.groups[0].examples[0].device
    generators = generators_before(before, device)
    values = run(*inputs)
    outputs: dict[int, Any] = dict(zip(deferred.returned, values, strict=False))
    taken = dict(zip(deferred.taken, values[len(deferred.returned) :], strict=True))
    for group in deferred.groups:
        dtypes = [region.plain_dtype(example.dtype) or example.dtype for example in group.examples]
        start = taken[group.head.taken] if group.head and group.head.taken else None
        later = _OfGroup(group, dtypes, inputs, start, generators, notice)
        forward.until_backward(later, later.start_bytes)
        symbols = symbol_values(region.inputs, inputs) if region.changing else {}
        for number, (position, example) in enumerate(zip(group.positions, group.examples, strict=True)):
            # Sizes that a later line of the model fixed are numbers behind symbols, also where none changes.
            sizes = with_values(example.shape, symbols), with_values(example.stride(), symbols)
            outputs[position] = later.on_demand(number, *sizes, dtypes[number], example.device)
    return [outputs[position] for position in range(len(outputs))]


class Later(ABC):
    """A computation of several tensors that runs when the first of them is read."""

    def __init__(self) -> None:
        self.values: weakref.WeakSet[_Value] = weakref.WeakSet()

    @property
    def is_stale(self) -> bool:
        """Whether anything that the computation reads has changed since this object was made; False unless a subclass
        checks it."""
        return False

    @abstractmethod
    def compute(self) -> None:
        """Compute the tensors, and pass them to `hand_over`."""

    def on_demand(
        self, number: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A stand-in with these sizes, strides, dtype and device for result `number` (from 0) of the computation, which
        has not run yet."""
        return OnDemand(_Value(self, number), sizes, strides, dtype, device)

    def hand_over(self, results: Sequence[torch.Tensor]) -> None:
        """Give the computed tensors, in the order of their numbers, to the stand-ins that were made for them."""
        for value in list(self.values):
            value.take(results[value.number])


class _OfGroup(Later):
    """The computation of a group of outputs for one call, with the values that it reads."""

    def __init__(
        self,
        group: Group,
        dtypes: Sequence[torch.dtype],
        inputs: Sequence[Any],
        start: torch.Tensor | None,
        generators: Any,
        notice: Notice,
    ) -> None:
        super().__init__()
        self.group, self.dtypes, self.start, self.generators, self.notice = group, dtypes, start, generators, notice
        read = {number for piece in (group.head, group.forward) if piece for number in piece.inputs}
        self.inputs = {number: inputs[number] for number in read}
        self.states = self._states(read)
        self.device = group.examples[0].device
        kind = self.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @property
    def start_bytes(self) -> int:
        """The bytes of the value `start` from which the outputs are computed; 0 without one."""
        return 0 if self.start is None else self.start.numel() * self.start.element_size()

    def release(self) -> None:
        """Drop `start` if the outputs can be computed by a second forward instead."""
        if self.group.forward is not None:
            self.start = None

    @property
    def piece(self) -> Piece:
        """The graph that computes the outputs: from `start`, or by a second run of the forward where that is None."""
        piece = self.group.forward if self.start is None else self.group.head
        assert piece is not None
        return piece

    @property
    def is_stale(self) -> bool:
        """Whether a weight or input that the computation reads was changed since the forward."""
        return any(state != self.states[number] for number, state in self._states(self.piece.inputs).items())

    def _states(self, numbers: Collection[int]) -> dict[int, Any]:
        """A key for each of the inputs with these numbers, which changes when a tensor is written to or gets other
        memory."""
        inputs = [(number, self.inputs[number]) for number in numbers]
        return {
            number: (value._version, value.data_ptr()) if isinstance(value, torch.Tensor) else value
            for number, value in inputs
        }

    def compute(self) -> None:
        """Compute the outputs, and hand them over to their `OnDemand` tensors. Raises `StaleOutputError` where a weight
        or input that is read was changed since the forward."""
        if self.is_stale:
            raise StaleOutputError(
                f"an output of shape {tuple(self.group.examples[0].shape)} is computed when it is first read, but the "
                "weights or inputs that it is computed from have changed since its forward; read it before "
                "optimizer.step(), or optimise with outputs='all'"
            )
        results = self._results()
        self.notice.say(results, again=self.start is None)
        self.hand_over(results)

    def _results(self) -> Sequence[torch.Tensor]:
        piece = self.piece
        given = (self.inputs[number] for number in piece.inputs)
        arguments = [bring(one, self.device) if isinstance(one, torch.Tensor) else one for one in given]
        arguments += [] if self.start is None else [self.start]
        generators = self.generators if piece.draws else generator_states(self.device)
        with torch.no_grad(), as_before(generators, self.device, self.autocast):
            results = piece.run(arguments)
            return [result.to(dtype) for result, dtype in zip(results, self.dtypes, strict=True)]


class _Value:
    """One result of a `Later`, and its tensor once that is computed. `OnDemand` tensors that are detached from each
    other share one. With `copied`, the tensor is a clone."""

    def __init__(self, later: Later, number: int, *, copied: bool = False) -> None:
        self.later: Later | None = later
        self.number, self.copied = number, copied
        self._tensor: torch.Tensor | None = None
        later.values.add(self)

    def take(self, result: torch.Tensor) -> None:
        """Keep the result, unless there is one already, and drop the computation."""
        if self._tensor is None:
            self._tensor, self.later = result.clone() if self.copied else result, None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, computed now if necessary. Raises `StaleOutputError` where the values that it is computed from
        were changed."""
        if self._tensor is None:
            assert self.later is not None
            self.later.compute()
            assert self._tensor is not None
        return self._tensor


class OnDemand(torch.Tensor):
    """An output that is computed when its values are first read.

    Its sizes, dtype and device can be read without computing it. Operators on it, except `detach` and in-place
    ones, pickles and copies give plain tensors."""

    _value: _Value

    @staticmethod
    def __new__(
        cls: type[OnDemand],
        value: _Value,
        sizes: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> OnDemand:
        made = wrapper_tensor(cls, sizes, strides, dtype, device)
        made._value = value
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NEED_MEMORY:
            args, kwargs = tree_map(as_plain, (args, kwargs))
        looks = func not in READ_NO_VALUES and not _is_copied_by_ddp(func)
        for leaf in tree_leaves((args, kwargs)) if looks else ():
            _look(leaf)  # here, as the modes around the call are no longer active when operators are dispatched
        with as_implemented():
            result = func(*args, **kwargs)
        # Functions that change nothing, such as `.cpu()`, and those that write in place return the tensor itself.
        return as_plain(result) if func in _MAY_RETURN_ITSELF else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._alias(args[0]._value)
        if func is aten.clone.default and args[0]._value.later is not None:
            value = args[0]._value
            return args[0]._alias(_Value(value.later, value.number, copied=True))
        args, kwargs = tree_map(_look, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _alias(self, value: _Value) -> OnDemand:
        with as_implemented():
            return OnDemand(value, self.shape, self.stride(), self.dtype, self.device)

    def __repr__(self) -> str:  # type: ignore[override]
        later = self._value.later
        if later is not None and later.is_stale:
            return f"OnDemand(not computed, shape={tuple(self.shape)}, dtype={self.dtype})"
        return repr(as_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return as_plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(as_plain(self), memo)


def as_plain(value: Any) -> Any:
    """An output on demand as a plain tensor with the same memory and gradient; anything else is returned as it is."""
    return value.view(value.shape) if isinstance(value, OnDemand) else value


def _look(value: Any) -> Any:
    return value._value.tensor if isinstance(value, OnDemand) else value


def _is_copied_by_ddp(func: Any) -> bool:
    """Whether `DistributedDataParallel` clones an output, as it does for some of its options: that is no read."""
    frame = inspect.currentframe() if func is torch.Tensor.clone else None
    caller = frame.f_back.f_back if frame and frame.f_back else None
    return caller is not None and caller.f_globals.get("__name__") == _DDP
