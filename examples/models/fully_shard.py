"""Models of 100 MB and more of parameters under FSDP2, sharded by block and at the root; for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt
from examples.models.ddp import VOCABULARY, gpt2
from examples.models.families import integers, library, normals
from examples.models.settled_gloo import settled

Batch = dict[str, Tensor]
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


@dataclass(frozen=True)
class Family:
    """A model, where its blocks lie in it, and its batches by seed."""

    make: Callable[[], nn.Module]
    blocks: str
    batch: Callable[[int], Batch]

    def sharded(self, ranks: int, *, checkpointed: bool = False, **options: Any) -> Any:
        """The model spread over ranks, with `options` of `fully_shard`, its exchanges `settled`; `checkpointed`: block
        by block."""
        model: Any = self.make()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.get_submodule(self.blocks):
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        settled(model)
        return model


def _texts(count: int) -> Callable[[int], Batch]:
    def batch(seed: int) -> Batch:
        tokens = integers(VOCABULARY, count, 64, seed=seed)
        return {"input_ids": tokens, "labels": tokens}

    return batch


def _images(seed: int) -> Batch:
    return {"pixel_values": normals(24, 3, 64, 64, seed=seed), "labels": integers(10, 24, seed=seed)}


FAMILIES = {
    "GPT-2": Family(gpt2, "transformer.h", _texts(16)),
    "Llama": Family(
        library(
            "Llama", "LlamaForCausalLM", "ForCausalLM",
            vocab_size=VOCABULARY, hidden_size=640, intermediate_size=1728, num_hidden_layers=4,
            num_attention_heads=10, num_key_value_heads=5, max_position_embeddings=64, use_cache=False,
        ),
        "model.layers",
        _texts(16),
    ),
    "ViT": Family(
        library(
            "ViT", "ViTForImageClassification", "ForSequenceClassification",
            image_size=64, patch_size=8, num_labels=10, problem_type="single_label_classification",
            hidden_size=640, intermediate_size=2560, num_hidden_layers=6, num_attention_heads=10,
        ),
        "vit.layers",
        _images,
    ),
}  # fmt: skip


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Train one step; return its loss. The gradients are left. Its outputs are held, as many loops do."""
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    loss: Tensor = outputs.loss.detach()
    return loss


def planned(model: Any, budget_gb: float, optimizer: torch.optim.Optimizer) -> Any:
    """The model, optimised so that it computes plain FSDP2's numbers."""
    return memopt.optimize(model, budget_gb, optimizer=optimizer, **EXACT)
