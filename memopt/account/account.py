"""The account of a training step: what it holds beside what the schedule moves, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt.account.caching_allocator import ROUNDING_BYTES
from memopt.account.optimizer_account import optimizer_account
from memopt.compat.storages import storage_key
from memopt.device.hardware_table import Hardware
from memopt.device.workspace_cuda import library_workspaces

# Scalars and small constants that torch holds beside the graph's tensors.
BOOKKEEPING_BYTES = 16 * 1024


@dataclass(frozen=True)
class Account:
    """Bytes that a step holds whatever the schedule, and what its optimiser adds after the backward."""

    parameters: int
    buffers: int
    inputs: int
    optimizer_state: int
    optimizer_temporaries: int
    gradients: int
    """All gradients of trainable parameters: made by the backward, or there from its start (`gradients_held`)."""
    reserve: int
    """Scalars; on a card also what libraries keep, and its context."""
    gradients_held: bool = False
    other_forwards: int = 0
    """What forwards hold whose backward is still to come."""
    between_regions: int = 0
    """The most that eager code holds between the captured regions, where the forward breaks into several."""
    lowering: int = 0
    """What the schedule's peak becomes more, or less where it is negative, once its graphs are lowered."""
    context: int = 0
    """Part of `reserve`: what the process holds on a card that torch's allocator does not count; 0 on the CPU."""
    rounding: int = 0
    """What the allocator hands out beyond what is asked for, which its count has too."""
    fragmentation: int = 0
    """What it must be able to hold beyond that, for the holes between the blocks."""

    @property
    def resident_bytes(self) -> int:
        """What is there from the first op of the forward to the last of the backward."""
        held = self.gradients if self.gradients_held else 0
        fixed = self.parameters + self.buffers + self.inputs + self.optimizer_state + self.reserve
        allocator = self.rounding + self.fragmentation
        return fixed + held + self.other_forwards + self.between_regions + self.lowering + allocator

    @property
    def uncounted_bytes(self) -> int:
        """What of it is not in `torch.cuda.max_memory_allocated`."""
        return self.context + self.fragmentation

    def optimizer_step_bytes(self, outputs: int) -> int:
        """The peak of `optimizer.step()`, while the caller still holds the inputs and `outputs` bytes of outputs."""
        resident = replace(self, gradients_held=True, lowering=0).resident_bytes
        return resident + outputs + self.optimizer_temporaries


def account_of(model: nn.Module, inputs: Iterable[torch.Tensor], optimizer: Any, card: Hardware) -> Account:
    """The account of training `model` on `inputs` with `optimizer` (class, instance, name or None) on a card.

    On CUDA in blocks of 512 bytes; what else its allocator holds is known once there is a schedule (`on_card`).
    """
    on_cuda = card.name != "cpu"
    block = ROUNDING_BYTES if on_cuda else 1
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer_bytes = optimizer_account(optimizer, trained, "cuda" if on_cuda else "cpu")
    home = parameters[0].device
    own = distinct_bytes([*parameters, *model.buffers()], block)
    return Account(
        parameters=distinct_bytes(parameters, block),
        buffers=own - distinct_bytes(parameters, block),
        inputs=distinct_bytes((each for each in inputs if each.device.type in (home.type, "meta")), block),
        optimizer_state=optimizer_bytes.state_bytes,
        optimizer_temporaries=optimizer_bytes.step_temporary_bytes,
        gradients=distinct_bytes(trained, block),
        reserve=BOOKKEEPING_BYTES + (card.context_bytes + sum(library_workspaces(card.major)) if on_cuda else 0),
        context=card.context_bytes if on_cuda else 0,
    )


def distinct_bytes(tensors: Iterable[torch.Tensor], block_bytes: int = 1) -> int:
    """Bytes of the storages behind `tensors`, each once, in whole blocks."""
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    return sum(-(-storage.nbytes() // block_bytes) * block_bytes for storage in storages.values())
