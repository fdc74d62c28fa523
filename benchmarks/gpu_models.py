"""The models of `benchmarks.gpu` at their real sizes, and at sizes that a CPU takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

from benchmarks.real_models import UNet

Batch = dict[str, Tensor]
LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


@dataclass(frozen=True)
class Candidate:
    """`make()` gives a model in train mode on the default device, `batch(size)` what trains it there."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    size: int
    """Samples of a batch."""
    tokens: int
    """Tokens of a sample; 1 for an image."""
    block: str
    """The class of the blocks that recipes checkpoint."""


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


def gpt2(small: bool) -> Candidate:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4} if small else {"n_layer": 24, "n_embd": 1024, "n_head": 16}
    words, length = (512, 64) if small else (50257, 1024)
    config = transformers.GPT2Config(**sizes, vocab_size=words, use_cache=False, bos_token_id=0, eos_token_id=0)
    made = library("GPT2LMHeadModel", config, "ForCausalLM")
    return Candidate("GPT-2 medium", made, text(words, length), 4 if small else 8, length, "GPT2Block")


def llama(small: bool) -> Candidate:
    """Llama 3.2 1B."""
    real = {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192}
    words, length = (512, 64) if small else (128256, 2048)
    heads = 2 if small else 8
    config = transformers.LlamaConfig(
        **(TINY if small else real),
        num_key_value_heads=heads,
        vocab_size=words,
        tie_word_embeddings=True,
        use_cache=False,
    )
    made = library("LlamaForCausalLM", config, "ForCausalLM")
    return Candidate("Llama 1B", made, text(words, length), 4, length, "LlamaDecoderLayer")


def vit(small: bool) -> Candidate:
    side, classes = (32, 10) if small else (224, 1000)
    sizes = {**(TINY if small else LARGE), "image_size": side, "patch_size": 8 if small else 16, "num_labels": classes}
    config = transformers.ViTConfig(**sizes, problem_type="single_label_classification")
    made = library("ViTForImageClassification", config, "ForSequenceClassification")
    return Candidate("ViT-L/16", made, images(side, classes), 32 if small else 64, 1, "ViTLayer")


def bert(small: bool) -> Candidate:
    words, length = (512, 64) if small else (30522, 512)
    config = transformers.BertConfig(**(TINY if small else LARGE), vocab_size=words)
    made = library("BertForMaskedLM", config, "ForMaskedLM")
    return Candidate("BERT-large", made, text(words, length), 4 if small else 16, length, "BertLayer")


def resnet(small: bool) -> Candidate:
    side, classes = (32, 10) if small else (224, 1000)
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]} if small else {}
    config = transformers.ResNetConfig(**sizes, num_labels=classes, problem_type="single_label_classification")
    made = library("ResNetForImageClassification", config, "ForSequenceClassification")
    return Candidate("ResNet-50", made, images(side, classes), 32 if small else 128, 1, "ResNetBottleNeckLayer")


def u_net(small: bool) -> Candidate:
    made = unet(width=8, levels=2) if small else unet()
    return Candidate("U-Net", made, segmentation(32 if small else 512), 4 if small else 8, 1, "DoubleConvolution")


def candidates(*, small: bool) -> Mapping[str, Candidate]:
    """The six models by name."""
    return {each.name: each for each in (make(small) for make in (gpt2, llama, vit, bert, resnet, u_net))}
