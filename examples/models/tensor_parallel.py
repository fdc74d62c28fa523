"""Models split by `parallelize_module` over ranks: with tensor parallelism alone, and with sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from examples.models.families import integers, library

Batch = dict[str, Tensor]
VOCABULARY, LENGTH = 256, 64


class Block(nn.Module):
    """A block of a transformer whose heads may be fewer than in its configuration: those of one rank."""

    def __init__(self, width: int, head: int, dropout: float) -> None:
        super().__init__()
        self.head, self.dropout = head, dropout
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.first_norm(hidden)
        heads = [layer(given).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in self.projections]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + functional.dropout(self.out(attended), self.dropout)
        return hidden + self.mlp(self.second_norm(hidden))

    @property
    def projections(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


class Transformer(nn.Module):
    """A decoder like GPT that returns its loss."""

    def __init__(self, width: int = 64, layers: int = 2, head: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, head, dropout) for _ in range(layers))
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.logits(self.norm(hidden)).flatten(0, 1), targets.flatten())


def split(model: Transformer, mesh: DeviceMesh, *, sequences: bool = False) -> Transformer:
    """The model split over the ranks of a mesh, in place; with `sequences`, each rank has its part of the sequence
    between the layers (sequence parallelism)."""
    between = Shard(1) if sequences else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "logits": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
            **({"norm": SequenceParallel()} if sequences else {}),
        },
    )
    for block in model.blocks:
        columns = {name: ColwiseParallel(input_layouts=between) for name in ("query", "key", "value", "mlp.0")}
        rows = {name: RowwiseParallel(output_layouts=between) for name in ("out", "mlp.2")}
        norms = {name: SequenceParallel() for name in ("first_norm", "second_norm")} if sequences else {}
        parallelize_module(block, mesh, {**columns, **rows, **norms})
    return model


def split_llama(model: Any, mesh: DeviceMesh) -> Any:
    """A Llama of transformers split over the ranks of a mesh, in place, as its own tp_plan has it."""
    columns = (*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        styles = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, styles)
    return model


@dataclass(frozen=True)
class Family:
    """A model, how it is split, and its batches by seed."""

    make: Callable[[], Any]
    split: Callable[[Any, DeviceMesh], Any]
    batch: Callable[[int], Batch]

    def sharded(self, ranks: int = 2) -> Any:
        """The model, split over ranks; the same weights on all of them."""
        torch.manual_seed(0)
        return self.split(self.make().train(), init_device_mesh("cpu", (ranks,)))


def texts(count: int, length: int, *names: str) -> Callable[[int], Batch]:
    """Batches of texts by seed, under these names."""
    return lambda seed: dict.fromkeys(names, integers(VOCABULARY, count, length, seed=seed))


def families(width: int = 64, layers: int = 2, count: int = 4, length: int = LENGTH) -> dict[str, Family]:
    """Models by name, of that width and number of layers, with batches of `count` texts of `length` tokens."""
    own = texts(count, length, "tokens", "targets")
    llama = library(
        "Llama", "LlamaForCausalLM", "ForCausalLM",
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return {
        "GPT": Family(lambda: Transformer(width, layers), split, own),
        "sequence parallel": Family(
            lambda: Transformer(width, layers), lambda model, mesh: split(model, mesh, sequences=True), own
        ),
        "Llama": Family(llama, split_llama, texts(count, length, "input_ids", "labels")),
    }
