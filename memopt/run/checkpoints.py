"""Training calls whose modules run as activation checkpoints, for forwards that cannot be planned in a graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memopt.capture.inputs import tensors_in
from memopt.compat.host import is_on_host
from memopt.compat.modules import compiled_call, plain_call, reset_compiled_call, set_compiled_call
from memopt.compat.saved_tensors import checkpoint_around, hooks_of_the_user
from memopt.compat.tensors import same_bits, set_values
from memopt.saved_values import written_parameters
from memopt.training_state import Attributes

Spots: TypeAlias = tuple["_Spot", ...]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_DEEPEST = 3
"""How deep checkpoints are nested at most: blocks, their parts, and the parts of these."""
_PIECE = 4096
"""The number of values of an output that are summed at once on the host."""
_SUMS_AGREE = 1e-5
"""When a module runs a second time, the sum of an output's values may differ by this part of the sum of their
magnitudes: kernels on a GPU may add in another order each time."""


class RecomputedOtherwiseError(RuntimeError):
    """Raised where a module's second run, in the backward, returns other values than its first."""


@dataclass(frozen=True)
class _Spot:
    """A module that runs as an activation checkpoint, and the modules within it that do so while it runs a second
    time."""

    module: nn.Module
    within: Spots = ()


@dataclass(eq=False)
class Checkpoints:
    """A choice of modules that run as activation checkpoints (`torch.utils.checkpoint`, not reentrant).

    State that a module changes in its call, such as running statistics, is set back for its second run, so that it
    changes once, as in the plain model.
    """

    model: nn.Module
    spots: Spots
    _checks: bool = field(default=False, init=False)
    _silently: set[int] = field(default_factory=set, init=False)
    """The `id`s of the buffers to which kernels write without raising their `_version`."""
    _of_count: list[weakref.ref[Any]] | None = field(default=None, init=False)
    """The module calls in the `counted` block that is under way, and torch's objects for their checkpoints; None
    outside of one. They are held weakly: the count is to see when these free their tensors."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which calls of the chosen modules run as checkpoints."""
        with _standing_in(self.spots, self._call_of):
            yield

    @contextmanager
    def checked(self) -> Iterator[None]:
        """A context in which `RecomputedOtherwiseError` is raised where the second run of a module returns other values
        than its first."""
        before, self._checks = self._checks, True
        try:
            with set_checkpoint_early_stop(False):
                yield
        finally:
            self._checks = before

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context in which a step is run only to count its bytes, so that its backward may stop early. When the block
        ends, its checkpointed calls free the tensors that they saved for their second run: where a call adds outputs to
        a container that it was given, or its output is added to its input in place, Python's collector would never free
        these tensors."""
        before, self._of_count = self._of_count, []
        try:
            yield
        finally:
            for reference in self._of_count:
                if (holds_tensors := reference()) is not None:
                    vars(holds_tensors).clear()
            self._of_count = before

    def __str__(self) -> str:
        """The modules in words."""
        names = {module: name for name, module in self.model.named_modules()}
        nested = [inner for spot in self.spots for inner in spot.within]
        text = _in_words([names.get(spot.module, "") for spot in self.spots])
        return f"{text}, each with {len(nested) // len(self.spots)} or more checkpoints within it" if nested else text

    def _call_of(self, spot: _Spot) -> Callable[..., Any]:
        own = compiled_call(spot.module) or plain_call(spot.module)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or hooks_of_the_user():  # these are to get what the module saves
                return own(*args, **kwargs)
            return checkpoint(_Body(self, spot, own, kwargs), *args, use_reentrant=False)

        return call


@dataclass(eq=False)
class _Body:
    """One call of a module, which runs once in the forward, and once more in the backward from the same state."""

    of: Checkpoints
    spot: _Spot
    own: Callable[..., Any]
    kwargs: Mapping[str, Any]
    _before: _State | None = None
    _sums: list[tuple[float, float]] | None = None
    _ran: bool = False

    def __call__(self, *args: Any) -> Any:
        if self._ran:
            return self._again(*args)
        if self.of._of_count is not None:
            self.of._of_count += map(weakref.ref, (self, *(checkpoint_around() or ())[:1]))
        module, checks = self.spot.module, self.of._checks
        own_ids = set(map(id, module.parameters())) if (known := written_parameters(self.of.model)) else ()
        before, self._ran = _State(module, [one for one in known if id(one) in own_ids]), True
        try:
            outputs = self._run(args)
        finally:  # a second run of a checkpoint around this one ends by an exception once it has all that it needs
            changed = before.has_changed(self.of._silently, look=checks)
            self._before = before if changed else None
        self._sums = sums_of(outputs) if checks else None
        return outputs

    def _run(self, args: Sequence[Any]) -> Any:
        with _standing_in(self.spot.within, self.of._call_of):
            return self.own(*args, **self.kwargs)

    def _again(self, *args: Any) -> Any:
        with self._before.for_a_time() if self._before else nullcontext():
            outputs = self._run(args)
        if self._sums is not None and not sums_agree(self._sums, sums_of(outputs)):
            raise RecomputedOtherwiseError(
                f"{type(self.spot.module).__name__} cannot run as an activation checkpoint: its second run, with the "
                "same random numbers and buffers, returned other values than its first; let its forward depend on its "
                "inputs and buffers only"
            )
        return outputs


class _State:
    """The attributes and buffers of a module, and its parameters `written`, at the time when this object is made."""

    def __init__(self, module: nn.Module, written: Sequence[torch.Tensor]) -> None:
        self._module, self._attributes = module, Attributes(module)
        buffers = (*module.buffers(), *self._attributes.tensors(), *written)
        self._values = [(one, one._version, one.detach().clone()) for one in buffers if not one.is_inference()]

    def has_changed(self, silently: set[int], *, look: bool) -> bool:
        """Whether an attribute was set, or a buffer or parameter written to, since this object was made. Copies of
        tensors that were not written to are freed.

        Some kernels, such as that of batch normalisation, write to a buffer without raising its `_version`. `silently`
        holds the `id`s of the buffers that are known for it, which count as written to. Others are found by comparing
        their values, and added: always on the host, but on a GPU only with `look`, as the host has to wait for it.
        """
        for tensor, version, value in self._values:
            if tensor._version == version and (look or is_on_host(tensor)) and not same_bits(tensor, value):
                silently.add(id(tensor))
        self._values = [kept for kept in self._values if kept[0]._version != kept[1] or id(kept[0]) in silently]
        return bool(self._values) or self._attributes.have_changed()

    @contextmanager
    def for_a_time(self) -> Iterator[None]:
        """A context that starts with the attributes and tensors of the time when this object was made; when it ends,
        those from before the block are restored."""
        now = Attributes(self._module)
        values = [(tensor, tensor.detach().clone()) for tensor, *_ in self._values]
        self._attributes.restore()
        for tensor, _, value in self._values:
            set_values(tensor, value)
        try:
            yield
        finally:
            now.restore()
            for tensor, value in values:
                set_values(tensor, value)


@contextmanager
def _standing_in(spots: Spots, call_of: Callable[[_Spot], Callable[..., Any]]) -> Iterator[None]:
    """A context in which each module of `spots` is called by what `call_of` returns for it."""
    before = [(spot.module, compiled_call(spot.module)) for spot in spots]
    calls = [call_of(spot) for spot in spots]
    for spot, call in zip(spots, calls, strict=True):
        set_compiled_call(spot.module, call)
    try:
        yield
    finally:
        for module, own in before:
            reset_compiled_call(module) if own is None else set_compiled_call(module, own)


def choices(model: nn.Module) -> Iterator[Checkpoints]:
    """Yields the choices of checkpointed modules that are worth trying, from the fastest to the one that holds least:
    the repeated blocks of the model; then these blocks and, nested in them, their submodules; then also the submodules
    of those submodules. Yields nothing for a model without repeated blocks."""
    blocks = tuple(dict.fromkeys(_blocks(model)))
    before = None
    for depth in range(_DEEPEST) if blocks else ():
        spots = tuple(_spot(block, depth) for block in blocks)
        if spots != before:
            yield Checkpoints(model, spots)
        before = spots


def _spot(block: nn.Module, depth: int) -> _Spot:
    """A block as a checkpoint, in which submodules down to `depth` levels are checkpoints too."""
    return _Spot(block, tuple(_spot(part, depth - 1) for part in dict.fromkeys(_parts(block))) if depth else ())


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The modules to run as checkpoints, which hold most activations: the elements of the outermost lists and sequences
    of modules, and the modules that are siblings of those lists."""
    for child in module.children():
        elements = list(child.children()) if isinstance(child, _CONTAINERS) else []
        if len(elements) > 1 and any(map(_is_composed, elements)):
            yield from filter(_is_composed, elements)
        elif elements or any(isinstance(one, _CONTAINERS) for one in child.modules()):
            yield from list(_blocks(child)) or ([child] if isinstance(child, nn.Sequential) else [])
        elif _is_composed(child):
            yield child


def _parts(block: nn.Module) -> Iterator[nn.Module]:
    """The children of a block that have children themselves; for a `ModuleList` or `ModuleDict`, its elements that have
    children."""
    for child in block.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from filter(_is_composed, child.children())
        elif _is_composed(child):
            yield child


def _is_composed(module: nn.Module) -> bool:
    """Whether a module has children. One without, such as a linear layer, gains little as a checkpoint: its input is
    held in any case."""
    return next(module.children(), None) is not None


def sums_of(outputs: Any) -> list[tuple[float, float]]:
    """For each floating-point tensor in `outputs`, the sum of its values in fp64 and the sum of their magnitudes."""
    with torch.no_grad():
        floats = [one.detach() for one in tensors_in(((outputs,), {})) if one.is_floating_point() and not one.is_sparse]
        return list(map(_sums, floats))


def _sums(tensor: torch.Tensor) -> tuple[float, float]:
    """The sums of a tensor's values and of their magnitudes. On the host it is summed in pieces: a sum in another dtype
    copies its input first, and a copy of the whole tensor would exceed the counted bytes of the step."""
    pieces: Sequence[torch.Tensor] = (tensor,)
    if is_on_host(tensor) and tensor.dim():
        longest = max(range(tensor.dim()), key=tensor.size)
        pieces = tensor.chunk(max(1, tensor.numel() // _PIECE), longest)
    wide = torch.promote_types(tensor.dtype, torch.float32)  # magnitudes in fp16 soon add up to infinity
    values = sum(piece.sum(dtype=torch.float64).item() for piece in pieces)
    return values, sum(torch.linalg.vector_norm(piece, 1, dtype=wide).item() for piece in pieces)


def sums_agree(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> bool:
    """Whether two results of `sums_of` are equal but for rounding; NaN is equal to NaN."""
    if len(first) != len(second):
        return False
    pairs = zip(first, second, strict=True)
    return all(str(a) == str(c) or abs(a - c) <= _SUMS_AGREE * max(b, d) for (a, b), (c, d) in pairs)


def _in_words(names: Sequence[str]) -> str:
    """The first and last of several module paths and their number, as "blocks.0 to blocks.11 (12 modules)"; a single
    path unchanged."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} modules)"
