"""Models of 100 MB and more of parameters under FSDP2, sharded by block and at the root; for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memopt
from examples.models.ddp import VOCABULARY, gpt2
from examples.models.families import integers, library, normals
from examples.models.settled_gloo import settled

Batch = dict[str, Tensor]
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
WHOLE, POLICY, REPLICAS = "fp32", "gathered in bf16", "two replicas"
SHARDINGS = (WHOLE, POLICY, REPLICAS)
"""Shards over all ranks; with parameters that are gathered in bf16 and gradients that are reduced in fp32; and over one
half of the ranks, the other half of which holds the same shards (HSDP)."""


@dataclass(frozen=True)
class Family:
    """A model, where its blocks lie in it, and its batches by seed."""

    make: Callable[[], nn.Module]
    blocks: str
    batch: Callable[[int], Batch]

    def sharded(self, ranks: int, *, checkpointed: bool = False, sharding: str = WHOLE) -> Any:
        """The model spread over ranks in one of `SHARDINGS`, its exchanges `settled`; `checkpointed`: block by
        block."""
        model: Any = self.make()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shape = (2, ranks // 2) if sharding == REPLICAS else (ranks,)
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        }
        if sharding == POLICY:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.get_submodule(self.blocks):
            fully_shard(block, **options)
        fully_shard(model, **options)
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
