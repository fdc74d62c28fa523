"""The account of a training step: what it holds beside what the schedule moves, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from memopt.budget.optimizer_account import optimizer_account
from memopt.pricing.workspace_cuda import CUDA_PERSISTENT_WORKSPACE_BYTES

# Scalars and small constants that torch holds beside the graph's tensors.
BOOKKEEPING_BYTES = 16 * 1024
# The context with cuBLAS and cuDNN loaded, a guess until measured, which never shows in torch's own count.
CUDA_CONTEXT_BYTES = 512 * 1024**2
# With what cuBLAS keeps for its workspaces, which does show.
CUDA_RESERVE_BYTES = CUDA_CONTEXT_BYTES + CUDA_PERSISTENT_WORKSPACE_BYTES


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
    gradients_held: bool = False
    other_forwards: int = 0
    """What forwards hold whose backward is still to come."""
    between_regions: int = 0
    """The most that eager code holds between the captured regions, where the forward breaks into several."""
    lowering: int = 0
    """What the schedule's peak becomes more, or less where it is negative, once its graphs are lowered."""

    @property
    def resident_bytes(self) -> int:
        """What is there from the first op of the forward to the last of the backward."""
        held = self.gradients if self.gradients_held else 0
        fixed = self.parameters + self.buffers + self.inputs + self.optimizer_state + self.reserve
        return fixed + held + self.other_forwards + self.between_regions + self.lowering

    def optimizer_step_bytes(self, outputs: int) -> int:
        """The peak of `optimizer.step()`, while the caller still holds the inputs and `outputs` bytes of outputs."""
        resident = replace(self, gradients_held=True, lowering=0).resident_bytes
        return resident + outputs + self.optimizer_temporaries


def account_of(model: nn.Module, inputs: Iterable[torch.Tensor], optimizer: Any, device: torch.device) -> Account:
    """The account of training `model` on `inputs` with `optimizer` (class, instance, name or None) on a device."""
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer_bytes = optimizer_account(optimizer, trained, device.type)
    home = parameters[0].device
    own = distinct_bytes([*parameters, *model.buffers()])
    return Account(
        parameters=distinct_bytes(parameters),
        buffers=own - distinct_bytes(parameters),
        inputs=distinct_bytes(tensor for tensor in inputs if tensor.device.type in (home.type, "meta")),
        optimizer_state=optimizer_bytes.state_bytes,
        optimizer_temporaries=optimizer_bytes.step_temporary_bytes,
        gradients=distinct_bytes(trained),
        reserve=BOOKKEEPING_BYTES + (CUDA_RESERVE_BYTES if device.type == "cuda" else 0),
    )


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
