"""Low-rank adapters set up for checkpointing as PEFT's `get_peft_model` does it; for tests and benchmarks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two matrices, with dropout before them, as PEFT's LoRA layer."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 0.5 * self.up(self.down(self.dropout(x)))
        return result


def with_adapters(model: Any, *, rank: int = 8, reentrant: bool = True) -> Any:
    """A Llama with adapters on the queries and values, all else frozen, with its blocks checkpointed and a hook that
    makes the output of the embedding require a gradient, without which reentrant checkpoints have none."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj, rank)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj, rank)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model
