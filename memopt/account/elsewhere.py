"""The bytes on a model's device that are no part of its training step: a teacher, an average of the parameters, the
other half of a GAN, cached tensors, another model's optimiser state."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import nlargest

import torch
from torch import nn

from memopt.account.account import BOOKKEEPING_BYTES
from memopt.account.allocated import AllocationLimit, allocated_bytes
from memopt.account.live_optimizer import LiveOptimizer, steps_any
from memopt.account.optimizer_state import state_tensors
from memopt.compat.subclasses import with_memory
from memopt.device.devices import device_of
from memopt.meter import blocks_of, live_objects
from memopt.recent import Recent
from memopt.units import size

_STEPS = 128
"""Plans that make room for more bytes elsewhere do so in steps of this part of the budget."""
_NOTABLE = 256
"""Growth below this part of the budget is looked at less often, and without collecting garbage first."""
_PATIENCE = 50
"""Looks for small growth take at most one part in this many of the time."""


@dataclass(frozen=True)
class Found:
    """The bytes beside a training step that a walk over Python's objects found."""

    other: int = 0
    """Tensors that belong to neither the model nor its optimisers, inputs or outputs."""
    state: int = 0
    """The state of the model's optimisers."""
    largest: tuple[str, ...] = field(default=(), compare=False)
    """The largest tensors of `other`, in words."""
    optimizers: tuple[LiveOptimizer, ...] = field(default=(), compare=False)
    """The optimisers that step parameters of the model."""

    def beside(self, planned_state: int) -> int:
        """The bytes beside a step whose account has `planned_state` bytes of optimiser state; 0 where the account's row
        for scalars covers them."""
        beside = self.other + max(0, self.state - planned_state)
        return beside if beside > BOOKKEEPING_BYTES else 0


@dataclass(frozen=True)
class Around:
    """The memory that belongs to a call of the model, or that is counted already."""

    inputs: tuple[torch.Tensor, ...] = ()
    """The call's."""
    addresses: Callable[[], frozenset[int]] = frozenset
    """Returns the addresses of further memory that is counted otherwise, such as what earlier forwards hold."""
    waiting_bytes: int = 0
    """Held by forwards of this model whose backward is still to come."""
    others_bytes: int = 0
    """Held by such forwards of other models."""
    kind: object = None
    """Equal for moments at which the same things are allocated, for each of which growth is noted by itself."""
    bucket_bytes: int = 0
    """Held by the buckets of `DistributedDataParallel`, which the account has in a row of its own."""
    buckets: frozenset[int] = frozenset()
    """The addresses of the buckets that are known."""
    copies: Callable[[], Iterable[torch.Tensor]] = tuple
    """Returns the copies by which calls can be undone now, which the account has: a call's are made after it begins."""

    @property
    def own(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the call that the account has."""
        return (*self.inputs, *self.copies())

    @property
    def known_bytes(self) -> int:
        """The bytes that differ from call to call and are known."""
        inputs = sum(tensor.nbytes for tensor in self.own if tensor.layout == torch.strided)
        return inputs + self.waiting_bytes + self.others_bytes


@dataclass(frozen=True)
class _Looked:
    """A look at what lies beside a step."""

    found: Found
    allocated_bytes: int | None
    """The bytes that were allocated then, without those that are known; None where the device does not say."""


class Elsewhere:
    """Counts what lies on the device of a model beside its training step.

    Python's objects are walked when a plan is made; later only where the bytes allocated on the device have grown so
    much that the plan might not fit.

    Args:
        libraries: the bytes of the workspaces of a card's libraries, which the account has.
        fixed_bytes: the bytes to count instead of those that are there; 0 for a plan for another device.
        with_state: whether the account has the optimiser's state, so that more than it expects is counted here.
    """

    def __init__(
        self, model: nn.Module, budget_bytes: int, fixed_bytes: int | None, *, with_state: bool, libraries: int = 0
    ) -> None:
        self.model, self.budget_bytes, self.fixed_bytes = model, budget_bytes, fixed_bytes
        self.with_state, self.libraries = with_state, libraries
        self._found = Found()
        """Of the latest look at any moment."""
        self._looks: Recent[object, _Looked] = Recent(_MOST_KINDS)
        """The latest look, by the kind of moment."""
        self._limit = AllocationLimit(self.device)
        self._next_look = 0.0
        self._held_still = False

    @property
    def note(self) -> str:
        """A sentence on the bytes elsewhere for plans and refusals; empty where there are next to none."""
        if not self._found.largest or self._found.other <= max(BOOKKEEPING_BYTES, self._notable):
            return ""
        return (
            f"elsewhere on the device are {size(self._found.other)} that are no part of this step, the largest "
            f"{', '.join(self._found.largest)}; what is freed before the next step leaves it more room, and "
            "elsewhere_gb=0 leaves them out of the budget"
        )

    @property
    def optimizers(self) -> tuple[LiveOptimizer, ...]:
        """The model's optimisers that the latest look found."""
        return self._found.optimizers

    @property
    def has_looked(self) -> bool:
        """Whether it is known which optimisers step the model, and what tensors lie beside it."""
        return self.fixed_bytes is not None or len(self._looks) > 0

    @property
    def _notable(self) -> int:
        """The bytes of which a change is looked at."""
        return self.budget_bytes // _NOTABLE

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @contextmanager
    def held_still(self, around: Around) -> Iterator[None]:
        """A context in which what appears is not counted, for copies that are made to check a step."""
        self.now(around)
        before, self._held_still = self._held_still, True
        try:
            yield
        finally:
            self._held_still = before

    def at_most(self, around: Around, enough: int = 0) -> Found | None:
        """No less than what is there now, read in microseconds; None where only a look can tell. A limit that is at
        most `enough` bytes may be far above what is there: finding it takes less time."""
        if self.fixed_bytes is not None:
            return Found(self.fixed_bytes)
        if self._held_still:
            return self._found
        if enough and (limit := self._limit.bytes()) is not None and limit <= enough:
            return Found(limit)
        growth = self._growth(around)
        if growth is None or growth < -self._notable:  # what was freed since the look may hide what has grown
            return None
        found = self._found_at(around)
        return replace(found, other=found.other + max(0, growth))

    def about(self, around: Around) -> int:
        """The bytes of other tensors that are there now, as far as it is known without a look."""
        found = self._found_at(around).other if self.fixed_bytes is None else self.fixed_bytes
        growth = None if self._held_still or self.fixed_bytes is not None else self._growth(around)
        return found + min(0, growth or 0)

    def now(self, around: Around) -> Found:
        """The bytes elsewhere now. Small growth may be found some seconds late, since walks over all objects are
        limited to a small part of the time.

        Garbage that has not been collected is collected before growth is believed.
        """
        if self.fixed_bytes is not None:
            return Found(self.fixed_bytes)
        notable = self._notable
        growth = self._growth(around)
        # Growth is unknown at the first moment of a kind, too, and may be large: only a look can tell.
        little = allocated_bytes(self.device) is None if growth is None else abs(growth) < notable
        patient = little and time.monotonic() < self._next_look
        none = growth is not None and abs(growth) < BOOKKEEPING_BYTES
        before = self._found_at(around)
        if self._held_still or patient or none:
            self._found = before
            return before
        found = self._look(around)
        if found.other - before.other > notable:
            gc.collect()
            found = self._look(around)
        self._found = found
        return found

    def _found_at(self, around: Around) -> Found:
        """What the latest look at such a moment found: what lies elsewhere in a forward may be the step's own in its
        backward. Where there was none, or what appears is not counted, what the latest look at any moment found."""
        looked = None if self._held_still else self._looks.get(around.kind)
        return self._found if looked is None else looked.found

    def _growth(self, around: Around) -> int | None:
        """The bytes allocated beyond those at the latest look at such a moment; None where that is not known."""
        allocated = allocated_bytes(self.device)
        looked = self._looks.get(around.kind)
        if allocated is None or looked is None or looked.allocated_bytes is None:
            return None
        return allocated - around.known_bytes - looked.allocated_bytes

    def _look(self, around: Around) -> Found:
        started = time.monotonic()
        found = look(self.model, self.device, around, libraries=self.libraries)
        found = found if self.with_state else replace(found, state=0)
        allocated = allocated_bytes(self.device)
        self._looks[around.kind] = _Looked(found, None if allocated is None else allocated - around.known_bytes)
        self._limit = AllocationLimit(self.device)
        ended = time.monotonic()
        self._next_look = ended + _PATIENCE * (ended - started)
        return found


def look(model: nn.Module, device: torch.device, around: Around, *, libraries: int = 0) -> Found:
    """Look for tensors on a device beside a model, its gradients, its optimisers' state and its present call.

    They are found among Python's objects, which takes about 0.2 seconds for half a million of them. Memory that only
    C++ holds is not seen on the CPU, such as activations that a plain model saved. On CUDA the allocator counts it, and
    `libraries` are the bytes of its count that the account has in its reserve.
    """
    found = live_objects(torch.Tensor, torch.optim.Optimizer)
    parameters = list(model.parameters())
    ids = set(map(id, parameters))
    optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer) and steps_any(one, ids)]
    block = device_of(device).block_bytes
    named = around.addresses()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = blocks_of(with_memory([*parameters, *gradients, *model.buffers(), *around.own]), device)
    states = (tensor for optimizer in optimizers for tensor in state_tensors(optimizer))
    state = blocks_of(with_memory(states), device)
    state = {address: nbytes for address, nbytes in state.items() if address not in own}
    tensors = [one for one in found if not isinstance(one, torch.optim.Optimizer)]
    beside = {
        address: nbytes
        for address, nbytes in blocks_of(tensors, device).items()
        if not (address in own or address in state or address in named or address in around.buckets)
    }
    other = sum(-(-nbytes // block) * block for nbytes in beside.values())
    state_bytes = sum(-(-nbytes // block) * block for nbytes in state.values())
    other += around.others_bytes
    if device_of(device).caching:
        in_buckets = sum(nbytes for address, nbytes in own.items() if address in around.buckets)
        buckets = max(0, around.bucket_bytes - in_buckets)  # which gradients are no views of
        known = sum(own.values()) + sum(state.values()) + around.waiting_bytes + buckets
        other = max(other, (allocated_bytes(device) or 0) - known - libraries)
    largest = _in_words(tensors, nlargest(_SHOWN, beside, key=beside.__getitem__), device)
    return Found(other, state_bytes, largest, tuple(map(LiveOptimizer.of, optimizers)))


def _in_words(tensors: Iterable[torch.Tensor], addresses: Sequence[int], device: torch.device) -> tuple[str, ...]:
    """The dtypes, shapes and bytes of the tensors at these addresses, the largest tensor at each."""
    words: dict[int, tuple[int, str]] = {}
    for tensor in tensors:
        for address, nbytes in blocks_of((tensor,), device).items() if tensor.device == device else ():
            if address in addresses and tensor.nbytes > words.get(address, (0, ""))[0]:
                kind = str(tensor.dtype).removeprefix("torch.")
                words[address] = tensor.nbytes, f"{kind} {list(tensor.shape)} of {size(nbytes)}"
    return tuple(words[address][1] for address in addresses if address in words)


def in_steps(nbytes: int, budget_bytes: int) -> int:
    """The bytes rounded up to a multiple of a small part of the budget, so that plans differ for few values only."""
    step = max(1, budget_bytes // _STEPS)
    return -(-nbytes // step) * step


_SHOWN = 3
"""The number of tensors that a note describes."""
_MOST_KINDS = 64
"""The number of kinds of moments for which the bytes allocated are remembered."""
