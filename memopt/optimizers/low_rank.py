"""Low-rank adaptation (LoRA) of a model on "meta", to plan what training it that way would take."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

RANK = 16


class _LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two fp32 matrices of rank `rank` (Hu et al. 2021)."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.empty(rank, in_features, device="meta"))
        self.up = nn.Parameter(torch.zeros(out_features, rank, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        low = functional.linear(x, self.down.to(x.dtype))
        result: Tensor = self.base(x) + functional.linear(low, self.up.to(x.dtype))
        return result


def with_low_rank(model: nn.Module, rank: int = RANK) -> tuple[nn.Module, int]:
    """A copy of the model on "meta" in which only adapters at its linear layers are trained, and their number.

    Linear layers that are direct children of the model, like the one that gives the logits, get none, as is usual.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo: dict[int, Any] = {number: _on_meta(tensor) for number, tensor in tensors.items()}
    twin = copy.deepcopy(model, memo).requires_grad_(False)
    number = 0
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            sizes = _linear_sizes(child)
            if sizes is not None and not isinstance(module, _LowRank) and module is not twin:
                setattr(module, name, _LowRank(child, *sizes, rank))
                number += 1
    return twin, number


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a linear layer, torch's or the transposed `Conv1D` of transformers; None for
    others."""
    weight = getattr(module, "weight", None)
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


def _on_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
