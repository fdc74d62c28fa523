"""A GPT from scratch, in the style of nanoGPT, trained within a budget on text that every Python ships.

`python examples/nanogpt.py --small` takes seconds on a CPU; without `--small` it is GPT-2's size, for a card of 12 GB.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    length: int
    sequences: int
    budget_gb: float


SMALL, FULL = Size(3, 4, 128, 128, 8, 0.022), Size(12, 12, 768, 1024, 16, 11.0)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A language model over bytes; it returns its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    torch.manual_seed(0)
    size = SMALL if "--small" in sys.argv else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.frombuffer(bytearray(" ".join(topics.values()).encode()), dtype=torch.uint8).to(device)

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - size.length, (size.sequences, 1), device=device)
        tokens = text[starts + torch.arange(size.length + 1, device=device)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    model = GPT(size).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memopt.optimize(model, size.budget_gb, example_inputs=batch(), optimizer=optimizer)
    print(memopt.plan_of(model))

    for step in range(1, 5):
        tokens, targets = batch()
        with memopt.measure_peak() as peak:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.3f}  peak {peak.bytes / 1024**3:.4f} of {size.budget_gb} GB")


if __name__ == "__main__":
    main()
