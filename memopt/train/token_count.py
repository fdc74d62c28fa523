"""Counts the terms that a batch's mean loss averages: the weight of the batch within its effective batch."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memopt.compat.ddp import unwrapped
from memopt.microbatch import samples_of

IGNORED = -100
"""The target that torch's cross entropy and Hugging Face's losses ignore."""
SHIFTING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Parts of the names of Hugging Face's loss types, and of models without one, whose loss compares position t with label
t + 1."""

Count = Callable[[Any], Any]


def count_of(batch: Any, model: nn.Module, count: Count | None, *, with_targets: bool) -> int | float | torch.Tensor:
    """The number of terms in the mean loss of `batch`, as a tensor on the device if it is computed from tensors there.

    A given `count` is called. Otherwise integer labels other than -100 are counted (`labels` or `shift_labels` of a
    dict, or the targets of a pair `(inputs, targets)`); in a causal Hugging Face model the first label of each sequence
    is left out, since nothing predicts it. Without such labels the samples are counted.

    Raises:
        ValueError: samples are counted, but the tensors have different numbers of them; or `count` returns a negative
            or infinite number; or the batch has a normalisation of its own (`num_items_in_batch`).
        TypeError: `count` returns neither a number nor a tensor of one element.
    """
    if count is not None:
        return _checked(count(batch))
    if isinstance(batch, Mapping):
        if batch.get("num_items_in_batch") is not None:
            raise ValueError(
                "the batch holds num_items_in_batch, so its loss is normalised twice; leave it out, or have count= "
                "give 1 for every microbatch and divide by their number yourself"
            )
        if _is_labels(batch.get("shift_labels")):
            return _valid(batch["shift_labels"])
        if _is_labels(batch.get("labels")):
            labels: torch.Tensor = batch["labels"]
            return _valid(labels[..., 1:] if labels.dim() > 1 and shifts_labels(model) else labels)
    elif with_targets and isinstance(batch, tuple) and len(batch) == 2 and _is_labels(batch[1]):
        return _valid(batch[1])
    return samples_of(batch)


def shifts_labels(model: nn.Module) -> bool:
    """Whether this is a Hugging Face model whose loss shifts labels against logits, as decoders do; encoder-decoders
    shift the decoder's inputs instead."""
    plain: Any = unwrapped(model)
    config = getattr(plain, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return False
    kind = getattr(plain, "loss_type", None) or type(plain).__name__
    return any(name in kind for name in SHIFTING)


def _is_labels(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype is not torch.bool


def _valid(labels: torch.Tensor) -> torch.Tensor:
    return (labels != IGNORED).sum()


def _checked(value: Any) -> int | float | torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(f"count must give one number for a batch, not a tensor of shape {tuple(value.shape)}")
        return value.detach().reshape(())
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"count must give a number or a tensor of one element, not {value!r}")
    if not math.isfinite(float(value)) or float(value) < 0:
        raise ValueError(f"count must give how many terms the mean loss has, zero or more, not {value!r}")
    return value if isinstance(value, (int, float)) else float(value)
