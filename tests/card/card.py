"""The card that these tests run on: a real one, or the stand-in, which allocates but does not compute."""

from __future__ import annotations

import ctypes
import gc
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification
from transformers.initialization import no_init_weights

from memopt.compat import card

MB = 1024**2
STAND_IN = hasattr(ctypes.CDLL(None), "memopt_card_stand_in")
"""Whether CUDA's libraries are those of `tests/card/stand_in`."""
needs_numbers = pytest.mark.skipif(STAND_IN, reason="the stand-in for a card does not compute")


def without_values() -> AbstractContextManager[None]:
    """A context in which models of transformers leave their parameters as they were allocated. Some ways to fill them
    read values back, which the stand-in does not have."""
    context: AbstractContextManager[None] = no_init_weights()
    return context


def forget() -> None:
    """Free what is not referred to, give the memory back to the card, and have torch's allocator use ordinary segments
    again."""
    torch._dynamo.reset()
    if card._turned_on:
        card._set_settings("expandable_segments:False")
        card._turned_on.clear()
    gc.collect()
    torch.cuda.empty_cache()


def vision_job(layers: int, width: int, images: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A vision transformer on the card and a batch of pictures of 224 by 224 pixels."""
    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        problem_type="single_label_classification",
    )
    with torch.device("cuda"), without_values():
        model = ViTForImageClassification(config).train()
        batch = {"pixel_values": torch.randn(images, 3, 224, 224), "labels": torch.zeros(images, dtype=torch.int64)}
    model.loss_type = "ForSequenceClassification"
    return model, batch


def cap(limit_bytes: float) -> None:
    """Limit the process to a number of bytes of torch's allocator."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.reset_peak_memory_stats()
