"""The bytes on a model's device that are no part of its training step: a teacher, an average of the parameters, the
other half of a GAN, cached tensors, another model's optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest

import torch
from torch import nn

from memopt.account.account import BOOKKEEPING_BYTES, Account, in_blocks
from memopt.account.eager_bytes import allocated_bytes
from memopt.account.optimizer_trial import LiveOptimizer, held_tensors, steps_any
from memopt.compat.tensors import with_memory
from memopt.device.devices import device_of
from memopt.live_objects import live_objects
from memopt.meter import blocks_of, largest_at
from memopt.units import size

_STEPS = 128
"""`in_steps` rounds bytes up to multiples of the budget divided by this."""


@dataclass(frozen=True)
class Elsewhere:
    """The bytes on a device that do not belong to a training step, as a search through Python's objects found them."""

    other: int = 0
    """Tensors that belong to neither the model nor its optimizers, inputs or outputs."""
    state: int = 0
    """The state of the model's optimizers."""
    gradients: int = 0
    """The gradients of the model's parameters, frozen ones among them."""
    largest: tuple[str, ...] = field(default=(), compare=False)
    """The largest tensors of `other`, in words."""
    optimizers: tuple[LiveOptimizer, ...] = field(default=(), compare=False)
    """The optimizers that step parameters of the model."""
    parameters: int = field(default=0, compare=False)
    """The bytes of parameters among `other`, such as a teacher's."""
    looked: bool = field(default=False, compare=False)
    """Whether a search found the bytes; else they are those that the user gave, or a limit."""

    def beside(self, account: Account) -> int:
        """The bytes found on the device that are no part of a step with this account: tensors of other code (`other`),
        and the optimizer state and gradients that exceed the account's rows for them. 0 if the sum is at most
        `BOOKKEEPING_BYTES`, which the account has in its row for scalars."""
        beside = self.other + max(0, self.state - account.optimizer_state) + max(0, self.gradients - account.gradients)
        return beside if beside > BOOKKEEPING_BYTES else 0


def look(
    model: nn.Module,
    device: torch.device,
    own: Iterable[torch.Tensor] = (),
    named: frozenset[int] = frozenset(),
    *,
    waiting_bytes: int = 0,
    others_bytes: int = 0,
    plain_bytes: int = 0,
    bucket_bytes: int = 0,
    buckets: frozenset[int] = frozenset(),
    libraries: int = 0,
) -> Elsewhere:
    """Search a device for tensors other than those of a model, its gradients, its optimizers' state and its current
    call.

    The first search in a process goes through all of Python's objects; later ones are faster (`live_objects`). On CUDA
    the allocator's count adds what no Python object holds. On the CPU, memory that only C++ holds is missed; of the
    activations that a plain model saved, only those are found that its modules passed on.

    Args:
        own: further tensors of the step: the call's inputs, and copies by which a failed call is undone.
        named: the addresses of memory that is counted already, such as what waiting forwards hold.
        waiting_bytes: held by this model's forwards that wait for their backward; the allocator's count includes it.
        others_bytes: held by waiting forwards of other models; these bytes are no part of the step.
        plain_bytes: held by waiting forwards without a plan, at unknown addresses: as many bytes of tensors with a
            `grad_fn`, at most, are taken to be theirs.
        bucket_bytes: the buckets of `DistributedDataParallel`; `buckets`: the addresses of those that are known.
        libraries: the workspaces of libraries, which the allocator's count includes and the account has in its reserve.
    """
    found = live_objects(torch.Tensor, torch.optim.Optimizer)
    parameters = list(model.parameters())
    ids = set(map(id, parameters))
    optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer) and steps_any(one, ids)]
    gradients = blocks_of(with_memory([one.grad for one in parameters if one.grad is not None]), device)
    own_blocks = gradients | blocks_of(with_memory([*parameters, *model.buffers(), *own]), device)
    states = (tensor for optimizer in optimizers for tensor in held_tensors(optimizer))
    state = blocks_of(with_memory(states), device)
    state = {address: nbytes for address, nbytes in state.items() if address not in own_blocks}
    tensors = [one for one in found if not isinstance(one, torch.optim.Optimizer)]
    beside = {
        address: nbytes
        for address, nbytes in blocks_of(tensors, device).items()
        if not (address in own_blocks or address in state or address in named or address in buckets)
    }
    other = in_blocks(beside.values(), device)
    if plain_bytes:
        in_graphs = blocks_of([one for one in tensors if one.grad_fn is not None], device).keys() & beside.keys()
        other -= min(plain_bytes, in_blocks((beside[address] for address in in_graphs), device))
    gradient_bytes = in_blocks((nbytes for address, nbytes in gradients.items() if address not in buckets), device)
    other += others_bytes
    if device_of(device).caching:
        in_buckets = sum(nbytes for address, nbytes in own_blocks.items() if address in buckets)
        bucket_rest = max(0, bucket_bytes - in_buckets)  # the part of which no gradient is a view
        known = sum(own_blocks.values()) + sum(state.values()) + waiting_bytes + bucket_rest
        other = max(other, (allocated_bytes(device) or 0) - known - libraries)
    largest = _in_words(tensors, beside, device)
    of_modules = blocks_of([one for one in tensors if isinstance(one, nn.Parameter)], device).keys() & beside.keys()
    in_modules = sum(beside[address] for address in of_modules)
    live = tuple(map(LiveOptimizer.of, optimizers))
    return Elsewhere(other, in_blocks(state.values(), device), gradient_bytes, largest, live, in_modules, looked=True)


def _in_words(tensors: Iterable[torch.Tensor], blocks: Mapping[int, int], device: torch.device) -> tuple[str, ...]:
    """The dtypes, shapes and bytes of the tensors in the largest of these blocks, the largest tensor in each."""
    addresses = nlargest(_SHOWN, blocks, key=blocks.__getitem__)
    largest = largest_at(addresses, tensors, device)
    described = [(largest[address], size(blocks[address])) for address in addresses if address in largest]
    return tuple(
        f"{str(one.dtype).removeprefix('torch.')} {'nested' if one.is_nested else list(one.shape)} of {nbytes}"
        for one, nbytes in described
    )


def in_steps(nbytes: int, budget_bytes: int) -> int:
    """`nbytes` rounded up to a multiple of a small part of the budget, so that plans depend on few distinct values."""
    step = max(1, budget_bytes // _STEPS)
    return -(-nbytes // step) * step


_SHOWN = 3
"""The number of tensors that a note describes."""
