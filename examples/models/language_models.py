"""Language models with a large vocabulary, and loops that train them; for tests and benchmarks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from memopt.account.account import distinct_bytes
from memopt.meter import measure_peak

Batch = dict[str, Tensor]
Loop = Callable[[nn.Module, Batch, torch.optim.Optimizer], object]

_COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_COMMON, "hidden_size": 128, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 32}
_SMALL = {**_COMMON, "hidden_size": 64}
_SMALL_GROUPED = {**_SMALL, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16}
CONFIGS: Mapping[str, Callable[[], Any]] = {
    "GPT-2": lambda: transformers.GPT2Config(n_embd=128, n_layer=4, n_head=4),
    "OPT": lambda: transformers.OPTConfig(
        vocab_size=20_000, hidden_size=128, ffn_dim=512, num_hidden_layers=4, num_attention_heads=4,
        word_embed_proj_dim=128,
    ),
    "Qwen3": lambda: transformers.Qwen3Config(vocab_size=151_936, **_GROUPED),
    "Gemma2": lambda: transformers.Gemma2Config(vocab_size=256_000, **{**_GROUPED, "hidden_size": 64}),
}  # fmt: skip
"""Vocabularies as in the published models, but for OPT's."""
SMALL_CONFIGS: Mapping[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=20_000, n_embd=64, n_layer=2, n_head=4),
    "opt": lambda: transformers.OPTConfig(vocab_size=20_000, ffn_dim=128, word_embed_proj_dim=64, **_SMALL),
    "qwen3": lambda: transformers.Qwen3Config(vocab_size=30_000, **_SMALL_GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(vocab_size=40_000, **_SMALL_GROUPED),
}
"""The same kinds of models, small enough for tests."""


def make(config: Any, samples: int, length: int) -> tuple[nn.Module, Batch]:
    """The model of a configuration in train mode, with random weights, and a batch of text for it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(0, config.vocab_size, (samples, length))
    return model, {"input_ids": tokens, "labels": tokens}


def dropping(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    """One step that holds nothing of the model's outputs but the loss."""
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def holding(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    """One step that holds the model's outputs to its end, as most loops do."""
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def peak_bytes(model: nn.Module, batch: Batch, steps: Iterable[Callable[[], object]]) -> int:
    """The most bytes held at once during `steps`: the model and its batch are counted, too."""
    held = distinct_bytes([*model.parameters(), *model.buffers(), *batch.values()])
    gc.collect()  # another model that was freed during the steps would take its bytes off the peak
    with measure_peak("cpu") as peak:
        for step in steps:
            step()
    return peak.allocated_bytes + held
