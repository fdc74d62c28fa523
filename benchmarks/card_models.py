"""The models of `benchmarks.card_bytes`: those of `benchmarks.gpu_models` and larger ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.gpu_models import Candidate, Size, candidates, gpt2, images, library, llama, text


def gpt2_small(size: Size) -> Candidate:
    """GPT-2 with 124 million parameters."""
    return _gpt2_of("GPT-2 small", size, {"n_layer": 12, "n_embd": 768, "n_head": 12}, 8)


def gpt2_xl(size: Size) -> Candidate:
    """GPT-2 with 1.5 billion parameters."""
    return _gpt2_of("GPT-2 1.5B", size, {"n_layer": 48, "n_embd": 1600, "n_head": 25}, 4)


def _gpt2_of(name: str, size: Size, sizes: Mapping[str, int], samples: int) -> Candidate:
    if size != "real":
        return replace(gpt2(size), name=name)
    config = transformers.GPT2Config(**sizes, vocab_size=50257, use_cache=False, bos_token_id=0, eos_token_id=0)
    made = library("GPT2LMHeadModel", config, "ForCausalLM")
    return Candidate(name, made, text(50257, 1024), samples, 1024, "GPT2Block")


def llama_8b(size: Size) -> Candidate:
    """Llama 3.1 8B."""
    if size != "real":
        return replace(llama(size), name="Llama 8B")
    config = transformers.LlamaConfig(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        tie_word_embeddings=False,
        use_cache=False,
    )
    made = library("LlamaForCausalLM", config, "ForCausalLM")
    return Candidate("Llama 8B", made, text(128256, 2048), 1, 2048, "LlamaDecoderLayer")


def mixtral(size: Size) -> Candidate:
    """Two of the 32 layers of Mixtral 8x7B at their full width, 3.2 billion parameters: all 32 fit no card. Tokens are
    sorted by expert, and one grouped product takes all experts, so that no size depends on values."""
    width, inner, heads, words, length, samples = {"real": (4096, 14336, 32, 32000, 2048, 4)}.get(
        size, (64, 128, 4, 512, 64, 2)
    )
    config = transformers.MixtralConfig(
        num_hidden_layers=2,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=words,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    made = library("MixtralForCausalLM", config, "ForCausalLM")
    return Candidate("Mixtral, 2 layers", made, text(words, length), samples, length, "MixtralDecoderLayer")


def resnet_152(size: Size) -> Candidate:
    side, samples = (224, 64) if size == "real" else (32, 4)
    depths: Any = [3, 8, 36, 3] if size == "real" else [1, 1, 1, 1]
    config = transformers.ResNetConfig(depths=depths, num_labels=1000, problem_type="single_label_classification")
    made = library("ResNetForImageClassification", config, "ForSequenceClassification")
    return Candidate("ResNet-152", made, images(side, 1000), samples, 1, "ResNetBottleNeckLayer")


def whisper(size: Size) -> Candidate:
    """Whisper small."""
    layers, width, heads, words, frames, length, samples = {
        "real": (12, 768, 12, 51865, 3000, 448, 8)
    }.get(size, (2, 64, 4, 512, 64, 16, 2))  # fmt: skip
    config = transformers.WhisperConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=width,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        vocab_size=words,
        max_source_positions=frames // 2,
        max_target_positions=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        use_cache=False,
    )

    def batch(count: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, words, (count, length))
        return {"input_features": torch.randn(count, 80, frames), "decoder_input_ids": tokens, "labels": tokens}

    made = library("WhisperForConditionalGeneration", config, "ForMaskedLM")
    return Candidate("Whisper small", made, batch, samples, length, "WhisperDecoderLayer")


def card_models(size: Size) -> Mapping[str, Candidate]:
    """The models by name, in order of what their figures are worth."""
    further = (gpt2_small, gpt2_xl, resnet_152, whisper, mixtral, llama_8b)
    return {**candidates(size), **{candidate.name: candidate for candidate in (make(size) for make in further)}}
