"""A second run of a forward that waits for its backward: the saved tensors of the first run are freed until the
backward reads them, to make room for other forwards. The caller's tensors among its inputs are kept alive only once
something was freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from memopt.capture.caller_modes import CallerModes
from memopt.capture.inputs import Call, tensors_in
from memopt.compat.autograd import next_node_number, nodes_since, python_nodes
from memopt.compat.operators import tree_flatten, tree_leaves, tree_unflatten
from memopt.compat.saved_tensors import all_saved, replace_saved, saved_by, set_versions
from memopt.compat.tensors import WeakStorage, bytes_by_address, special_kind
from memopt.run.checkpoints import sums_agree, sums_of
from memopt.saved_values import generator_states, set_generators
from memopt.training_state import CallState, ForwardState, undone_but_parameters

_CHANGED = (
    "a variable needed for gradient computation has been modified by an inplace operation: a weight or an input of a "
    "forward that is run once more in its backward, since the budget has no room for what several forwards save; "
    "change it after the backward"
)


@contextmanager
def as_before(
    generators: tuple[Any, ...], device: torch.device, autocast: tuple[bool, torch.dtype | None] = (False, None)
) -> Iterator[None]:
    """A context with the random generators in these states, and with autocast as it was in a first run: whether it was
    on, and its dtype. At its end the generators are as before it."""
    now, (enabled, dtype) = generator_states(device), autocast
    try:
        set_generators(generators, device)
        with torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False):
            yield
    finally:
        set_generators(now, device)


def held_with_second_run(held_bytes: int, outputs: Iterable[WeakStorage]) -> tuple[int, int]:
    """Two figures of a forward that will run a second time in its backward. The first: the bytes that it holds until
    then, which are `held_bytes`, those that could not be freed, but no less than its `outputs`. The second: the
    further bytes that its backward needs because of the second run."""
    returned = sum(one.nbytes for one in outputs)
    return max(returned, held_bytes), max(1, 2 * returned)  # both runs' outputs, and their gradients


@dataclass(frozen=True, eq=False)
class WeakInputs:
    """The inputs with which a region ran. Tensors that only the caller holds are referenced weakly, so that the caller
    can free them. Versions show whether a tensor was written to after the region began to run."""

    references: Sequence[Any]
    """The inputs; weak references for tensors that only the caller holds."""
    versions: Sequence[int]
    """The inputs' `_version`s; 0 for values that are not tensors, and for tensors made in inference mode."""
    places: Mapping[int, object]
    """For each tensor that only the caller holds, by its number: its address, shape, strides and dtype (`_place`)."""

    @classmethod
    def of(cls, inputs: Sequence[Any], given: Iterable[torch.Tensor]) -> WeakInputs:
        """The `inputs` of a region that runs now. `given` are the tensors of the call, which the caller holds; the
        other inputs are the model's."""
        ids = set(map(id, given))
        own = {number: one for number, one in enumerate(inputs) if id(one) in ids and type(one) is not nn.Parameter}
        references = list(inputs)
        for number, one in own.items():
            references[number] = TensorWeakRef(one)
        return cls(references, _versions(inputs), {number: _place(one) for number, one in own.items()})

    def present(self, saved: Callable[[], Iterable[torch.Tensor]]) -> list[Any]:
        """The inputs in order. A tensor that the caller has freed is replaced by one of those that the forward's
        autograd nodes have saved, which `saved` returns: if address, shape, strides and dtype are equal, it is the same
        tensor, since the caller held it until all of them were saved. Without such a tensor, None takes its place."""
        found = [one() if isinstance(one, TensorWeakRef) else one for one in self.references]
        if self.are_gone(found):
            same = {_place(one): one.detach() for one in saved()}
            for number, place in self.places.items():
                if found[number] is None and place is not None:
                    found[number] = same.get(place)
        return found

    def are_gone(self, present: Sequence[Any]) -> bool:
        """Whether any of the caller's tensors was freed: it is None in `present`, the result of `present()`."""
        return any(present[number] is None for number in self.places)

    def have_changed(self, present: Sequence[Any], but: Collection[int] = ()) -> bool:
        """Whether any tensor in `present`, the result of `present()`, has been written to since the region ran, except
        the inputs at the positions `but`."""
        both = enumerate(zip(_versions(present), self.versions, strict=True))
        return any(number not in but and now != before for number, (now, before) in both)


def _versions(values: Iterable[Any]) -> list[int]:
    """The `_version` of each value; 0 for those that are not tensors, and for tensors made in inference mode."""
    return [one._version if isinstance(one, torch.Tensor) and not one.is_inference() else 0 for one in values]


def _place(tensor: torch.Tensor) -> object:
    """The address, shape, strides and dtype of a plain tensor; None for any other."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if plain else None


@dataclass(frozen=True, eq=False)
class SecondRun:
    """Runs a forward in one region a second time in its backward, to compute freed saved tensors again. The caller's
    tensors among its inputs are kept alive only once something was freed."""

    run: Callable[..., Sequence[Any]]
    """The emitted code of the region, a function of its inputs."""
    inputs: WeakInputs
    written: frozenset[int]
    """The numbers of the inputs that the region writes to."""
    before: CallState
    """The random states before the call, and copies of the inputs to which it writes."""
    tensors: list[torch.Tensor] = field(default_factory=list)
    """The inputs, set once saved tensors of the first run were freed."""

    @classmethod
    def of(
        cls,
        written: frozenset[int],
        inputs: Sequence[Any],
        weak: WeakInputs,
        run: Callable[..., Any],
        before: CallState | None,
    ) -> SecondRun | None:
        """The second run of a region whose first run begins now with `inputs`; `weak` refers to the same inputs weakly.
        `run` is the region's emitted code, `written` has the positions of the inputs to which it writes, and `before`
        is the state before the call. None where `before` is None or lacks a copy of an input that is written to."""
        if before is None:
            return None
        copied = before.values.copies()
        if any(id(inputs[number]) not in copied for number in written):
            return None
        return cls(run, weak, written, before)

    def free(self, node: Any, device: torch.device, kept: Collection[int]) -> int:
        """Free the tensors on `device` that `node`, the first run's autograd node, has saved, except at the addresses
        `kept`; reading one of them starts the second run. Returns the bytes freed: 0, with nothing freed, where an
        input no longer exists or was changed after the first run began."""
        inputs = self.inputs.present(partial(saved_by, node))
        copies = self.before.values.copies()
        changed = self.inputs.are_gone(inputs) or self.inputs.have_changed(inputs, but=self.written)
        if changed or any(id(inputs[number]) not in copies for number in self.written):
            return 0
        own = bytes_by_address(inputs, device).keys() | set(kept)
        first = {number: copies[id(inputs[number])] for number in self.written}
        self.tensors.extend(one for one in inputs if isinstance(one, torch.Tensor))
        return replace_saved((node,), own, device, lambda: self._saved(inputs, first, device))

    def _saved(
        self, inputs: Sequence[Any], first: dict[int, torch.Tensor], device: torch.device
    ) -> Sequence[torch.Tensor]:
        """Make the second run, and return its saved tensors in the order of the first run's. `first` are the values
        that inputs to which the region writes had before the first run."""
        if self.inputs.have_changed(inputs, but=self.written):
            raise RuntimeError(_CHANGED)
        arguments = list(inputs)
        for number, value in first.items():
            arguments[number] = value.to(device, copy=True)
        with torch.enable_grad(), as_before(self.before.generators, device):
            outputs = self.run(*arguments)
        made = {one.grad_fn for one in outputs if isinstance(one, torch.Tensor) and one.grad_fn is not None}
        (node,) = {node for found in made for node in python_nodes(found)}
        return all_saved((node,))


@dataclass(frozen=True, eq=False)
class PlainSecondRun:
    """Runs the plain model's forward a second time in its backward, from the state before its first run, to compute
    freed saved tensors again."""

    model: nn.Module
    run: Callable[..., Any]
    """The plain forward, a function of the call's arguments."""
    structure: Any
    """The containers of these arguments, whose leaves come first in `inputs`."""
    inputs: WeakInputs
    """The leaves of the arguments, and the model's parameters."""
    before: ForwardState
    modes: CallerModes
    first_node: int
    """A number below those of the autograd nodes of the first run."""
    sums: list[tuple[float, float]] = field(default_factory=list)
    """Sums of the first run's outputs (`sums_of`), to detect a second run with other values."""

    @classmethod
    def of(cls, model: nn.Module, run: Callable[..., Any], call: Call) -> PlainSecondRun | None:
        """The second run of a call whose first run begins now; None where an input is sparse, nested or quantised.
        `run` is the plain forward, a function of the call's arguments.

        Only for models without forward hooks of the user, which may change objects outside of the model: models with
        such hooks never run plain, as their steps are not counted."""
        tensors = list(tensors_in(call))
        if any(map(special_kind, tensors)):
            return None
        leaves, structure = tree_flatten(call)
        inputs = WeakInputs.of([*leaves, *model.parameters()], tensors)
        before = ForwardState.of(model, tensors, ())
        return cls(model, run, structure, inputs, before, CallerModes.now(), next_node_number())

    def returned(self, result: Any) -> None:
        """Record sums of the first run's outputs, `result`, with which those of the second run are compared."""
        self.sums.extend(sums_of(result))

    def free(self, returned: Iterable[Any], device: torch.device, kept: Collection[int]) -> int:
        """Free the tensors on `device` that the first run has saved, except at the addresses `kept`; reading one of
        them starts the second run. `returned` has the autograd nodes of the first run's outputs. Returns the bytes
        freed: 0, with nothing freed, where an input no longer exists, or an input or the model was changed after the
        first run began."""
        nodes = nodes_since(returned, self.first_node)
        inputs = self.inputs.present(lambda: [tensor for node in nodes for tensor in saved_by(node)])
        gone = self.inputs.are_gone(inputs) or self.inputs.have_changed(inputs)
        if gone or not self.before.can_be_undone() or self.before.attributes.have_changed():
            return 0
        own = bytes_by_address((*inputs, *self.model.buffers()), device).keys() | set(kept)
        return replace_saved(nodes, own, device, partial(self._saved, inputs, [type(node) for node in nodes]))

    def _saved(self, inputs: Sequence[Any], kinds: Sequence[type]) -> Sequence[torch.Tensor]:
        if self.inputs.have_changed(inputs):
            raise RuntimeError(_CHANGED)
        args, kwargs = tree_unflatten(inputs[: self.structure.num_leaves], self.structure)
        written = self.before.values.alive()
        versions = [one._version for one in written]  # unfreed nodes have saved some of them
        with undone_but_parameters(self.model), torch.enable_grad(), self.modes.restored():
            self.before.undo()
            number = next_node_number()
            result = self.run(*args, **kwargs)
            made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
            nodes = nodes_since({one.grad_fn for one in made if one.grad_fn is not None}, number)
        set_versions(written, versions)
        if [type(node) for node in nodes] != kinds or not sums_agree(self.sums, sums_of(result)):
            raise RuntimeError(
                f"{type(self.model).__name__} computes something else when its forward runs a second time from the "
                "same state, which it does since the budget has no room for what several forwards save; give a larger "
                "budget, or let its forward depend on its inputs, parameters and buffers only"
            )
        return all_saved(nodes)
