"""Llama 3.1 in its published sizes, written with plain torch operators as pre-training code has it: rotary embeddings
as complex numbers, keys and values repeated for grouped heads, the loss in fp32 outside of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaSize:
    """The sizes of a Llama."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    words: int = 128_256
    longest: int = 8192

    def of(self, layers: int) -> LlamaSize:
        """The same with another number of layers."""
        return replace(self, layers=layers)


SIZES = {
    "8B": LlamaSize(4096, 32, 32, 8, 14336),
    "70B": LlamaSize(8192, 80, 64, 8, 28672),
    "405B": LlamaSize(16384, 126, 128, 8, 53248),
}
"""Table 3 of "The Llama 3 Herd of Models" (2024)."""
TP_PLAN = {
    "embedding": "rowwise",
    "layers.*.attention.[qkv]": "colwise",
    "layers.*.attention.out": "rowwise",
    "layers.*.mlp.gate": "colwise",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "head": "colwise",
}
"""How tensor parallelism splits its layers, the vocabulary of the loss included."""


class Attention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.head_width, self.times = size.width // size.heads, size.heads // size.key_heads
        narrow = size.key_heads * self.head_width
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k = nn.Linear(size.width, narrow, bias=False)
        self.v = nn.Linear(size.width, narrow, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)) for layer in (self.q, self.k, self.v))
        q, k = _turned(q, turns), _turned(k, turns)
        k, v = (value.repeat_interleave(self.times, dim=2) for value in (k, v))
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return result


def _turned(value: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(value.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[: value.shape[1], None]).flatten(3).type_as(value)


class Mlp(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.inner, bias=False)
        self.up = nn.Linear(size.width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(size.width, 1e-5), Attention(size)
        self.mlp_norm, self.mlp = nn.RMSNorm(size.width, 1e-5), Mlp(size)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Llama(nn.Module):
    """Returns the logits of every token."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, 1e-5)
        self.head = nn.Linear(size.width, size.words, bias=False)
        self.register_buffer("turns", _turns(size.width // size.heads, size.longest))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.turns)
        result: Tensor = self.head(self.norm(x))
        return result


def _turns(head_width: int, longest: int) -> Tensor:
    """The rotation of every pair of a head at every position, as complex numbers."""
    rates = 500_000.0 ** -(torch.arange(0, head_width, 2) / head_width)
    angles = torch.outer(torch.arange(longest), rates)
    return torch.polar(torch.ones_like(angles), angles)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of all tokens, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def on_meta(size: LlamaSize) -> Llama:
    """A model without values."""
    with torch.device("meta"):
        return Llama(size).train()


def batch(samples: int, length: int) -> tuple[tuple[Any, ...], Tensor]:
    """A batch without values: inputs and targets."""
    tokens, targets = (torch.empty(samples, length, dtype=torch.long, device="meta") for _ in range(2))
    return (tokens,), targets
