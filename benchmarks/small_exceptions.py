"""Where the general rules of `benchmarks.small_architectures` do not make a small model: attributes and batches by type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

KEPT = frozenset({"transformers_version", "num_labels", "num_return_sequences", "chunk_size_feed_forward", "num_feat_extract_layers"})
"""Attributes that always keep their value."""
FIRST = frozenset(
    "bert gpt2 llama vit wav2vec2 t5 bart distilbert roberta mistral qwen2 qwen3 gemma2 gemma3_text mixtral resnet convnext "
    "swin segformer detr whisper opt bloom gpt_neox phi3 deberta-v2 albert electra mamba longt5 canine pegasus_x lxmert "
    "convnextv2 modernbert bit regnet deit beit hubert wavlm speech_to_text audio-spectrogram-transformer clip".split()
)
"""Common types, and those that were wrong or refused once."""
NOT_TRAINED: frozenset[str] = frozenset()
"""Model types without a loss of their own."""
CHANGES: dict[str, dict[str, Any]] = {}
"""Attributes in place of those that the rules give; "defaults" are those that the configuration cannot be made
without."""
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {}
"""Batches of those whose forward takes something else."""


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)
