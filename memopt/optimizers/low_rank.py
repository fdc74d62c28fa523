"""Low-rank adaptation (LoRA), as far as planning asks for it: what is frozen, and what learns beside it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

RANK = 16


class LowRank(nn.Module):
    """A frozen linear layer, and a sum of `rank` outer products that learns beside it (Hu et al. 2021), in fp32."""

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
    """A copy on "meta" in which only adapters at the linear layers learn, and how many of them there are.

    The layer that gives the logits has none, as is usual: the last linear layer of the model outside of its blocks.
    """
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    memo: dict[int, Any] = {number: _on_meta(each) for number, each in tensors.items()}
    twin = copy.deepcopy(model, memo).requires_grad_(False)
    number = 0
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            sizes = _linear_sizes(child)
            if sizes is not None and not isinstance(module, LowRank) and module is not twin:
                setattr(module, name, LowRank(child, *sizes, rank))
                number += 1
    return twin, number


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a linear layer: torch's, or GPT-2's in transformers, which turns its weight."""
    weight = getattr(module, "weight", None)
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    return None


def _on_meta(tensor: Tensor) -> Tensor:
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
