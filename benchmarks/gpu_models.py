"""The models of `benchmarks.gpu` at their real sizes, and at two that a CPU takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from benchmarks.real_models import UNet

Batch = dict[str, Tensor]
Size = Literal["real", "middle", "tiny"]
""""tiny" is for tests that the code runs; "middle" for times on a CPU, of which operators take the most."""
LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
MIDDLE = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
ENCODER = {"real": LARGE, "middle": MIDDLE, "tiny": TINY}


@dataclass(frozen=True)
class Candidate:
    """A model at one size: `make()` gives it in train mode on the default device, `batch(size)` a batch for it."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    size: int
    """Samples of a batch."""
    tokens: int
    """Tokens of a sample; 1 for an image."""
    block: str
    """The class of the blocks that recipes checkpoint."""


def made(candidate: Candidate, *, filled: bool = True) -> tuple[nn.Module, Batch]:
    """A candidate's model and batch on the card. Parameters that are not `filled` are left as they are allocated."""
    with torch.device("cuda"), nullcontext() if filled else no_init_weights():
        model, batch = candidate.make(), candidate.batch(candidate.size)
    if isinstance(model, transformers.PreTrainedModel):
        model.tie_weights()  # which is part of filling them, and changes their bytes
    return model, batch


def library(head: str, config: transformers.PretrainedConfig, loss: str) -> Callable[[], nn.Module]:
    """A Hugging Face model with random weights; without a loss by name it is looked up at each call, with a warning."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, head)(config)
        model.loss_type = loss  # type: ignore[assignment]
        return model.train()

    return make


def text(vocabulary: int, length: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        tokens = torch.randint(0, vocabulary, (size, length))
        return {"input_ids": tokens, "labels": tokens}

    return batch


def images(side: int, classes: int) -> Callable[[int], Batch]:
    return lambda size: {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.randint(0, classes, (size,))}


def segmentation(side: int) -> Callable[[int], Batch]:
    return lambda size: {"images": torch.randn(size, 3, side, side), "targets": torch.randint(0, 2, (size, side, side))}


def unet(**sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return UNet(**sizes).train()

    return make


def gpt2(size: Size, first_layers: int | None = None) -> Candidate:
    """GPT-2 medium; with only the first of its layers if a number is given."""
    layers, width, heads, words, length, samples = {
        "real": (24, 1024, 16, 50257, 1024, 8), "middle": (4, 256, 4, 8192, 256, 4), "tiny": (2, 64, 4, 512, 64, 4)
    }[size]  # fmt: skip
    sizes = {"n_layer": first_layers or layers, "n_embd": width, "n_head": heads, "vocab_size": words}
    config = transformers.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    made = library("GPT2LMHeadModel", config, "ForCausalLM")
    return Candidate("GPT-2 medium", made, text(words, length), samples, length, "GPT2Block")


def llama(size: Size) -> Candidate:
    """Llama 3.2 1B."""
    real = {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192}
    words, length, heads = {"real": (128256, 2048, 8), "middle": (8192, 256, 2), "tiny": (512, 64, 2)}[size]
    config = transformers.LlamaConfig(
        **(real if size == "real" else ENCODER[size]),
        num_key_value_heads=heads,
        vocab_size=words,
        tie_word_embeddings=True,
        use_cache=False,
    )
    made = library("LlamaForCausalLM", config, "ForCausalLM")
    return Candidate("Llama 1B", made, text(words, length), 4, length, "LlamaDecoderLayer")


def vit(size: Size) -> Candidate:
    side, patch, classes, samples = {"real": (224, 16, 1000, 64), "middle": (96, 8, 100, 16), "tiny": (32, 8, 10, 32)}[
        size
    ]
    sizes = {**ENCODER[size], "image_size": side, "patch_size": patch, "num_labels": classes}
    config = transformers.ViTConfig(**sizes, problem_type="single_label_classification")
    made = library("ViTForImageClassification", config, "ForSequenceClassification")
    return Candidate("ViT-L/16", made, images(side, classes), samples, 1, "ViTLayer")


def bert(size: Size) -> Candidate:
    words, length, samples = {"real": (30522, 512, 16), "middle": (8192, 256, 4), "tiny": (512, 64, 4)}[size]
    config = transformers.BertConfig(**ENCODER[size], vocab_size=words)
    made = library("BertForMaskedLM", config, "ForMaskedLM")
    return Candidate("BERT-large", made, text(words, length), samples, length, "BertLayer")


def resnet(size: Size) -> Candidate:
    side, classes, samples = {"real": (224, 1000, 128), "middle": (96, 100, 16), "tiny": (32, 10, 32)}[size]
    sizes: dict[str, Any] = {
        "real": {},
        "middle": {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]},
        "tiny": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]},
    }[size]
    config = transformers.ResNetConfig(**sizes, num_labels=classes, problem_type="single_label_classification")
    made = library("ResNetForImageClassification", config, "ForSequenceClassification")
    return Candidate("ResNet-50", made, images(side, classes), samples, 1, "ResNetBottleNeckLayer")


def u_net(size: Size) -> Candidate:
    made = {"real": unet(), "middle": unet(width=16, levels=3), "tiny": unet(width=8, levels=2)}[size]
    side, samples = {"real": (512, 8), "middle": (96, 4), "tiny": (32, 4)}[size]
    return Candidate("U-Net", made, segmentation(side), samples, 1, "DoubleConvolution")


def candidates(size: Size) -> Mapping[str, Candidate]:
    """The six models by name."""
    return {candidate.name: candidate for candidate in (make(size) for make in (gpt2, llama, vit, bert, resnet, u_net))}
