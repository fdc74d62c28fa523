"""Models at their real dimensions, on the meta device in bfloat16, each with a batch that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class RealModel:
    """`make()` gives a model in train mode that returns its loss, `batch()` its keyword arguments; both on meta."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T` in pieces of `rows` tokens, gradients included in the forward: neither
    the logits nor their gradient are ever whole (as in Liger Kernel, Hsu et al. 2024, section 3.2)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        loss = hidden.new_zeros((), dtype=torch.float32)
        hidden_gradients = []
        weight_gradient = torch.zeros_like(weight)
        for piece, targets in zip(hidden.split(rows), labels.split(rows), strict=True):
            logits = (piece @ weight.T).float()
            log_probabilities = logits.log_softmax(-1)
            loss = loss - log_probabilities.gather(1, targets[:, None]).sum()
            gradient = (log_probabilities.exp() - F.one_hot(targets, weight.shape[0])).to(piece.dtype)
            hidden_gradients.append(gradient @ weight)
            weight_gradient = torch.addmm(weight_gradient, gradient.T, piece)
        ctx.save_for_backward(torch.cat(hidden_gradients), weight_gradient)
        return loss / labels.numel()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        scale = (gradients[0] / hidden_gradient.shape[0]).to(hidden_gradient.dtype)
        return hidden_gradient * scale, weight_gradient * scale, None, None


class WithChunkedLoss(nn.Module):
    """A Hugging Face language model whose logits are never whole."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        model: Any = self.model
        hidden = model.base_model(input_ids=input_ids).last_hidden_state
        weight = model.get_output_embeddings().weight
        return ChunkedLoss.apply(hidden.flatten(0, 1), weight, labels.flatten(), self.rows)  # type: ignore[no-any-return]


class DoubleConvolution(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        def one(wide: int) -> list[nn.Module]:
            return [nn.Conv2d(wide, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

        super().__init__(*one(inputs), *one(outputs))


class UNet(nn.Module):
    """Four levels of 64 to 1,024 channels (Ronneberger et al. 2015, figure 1), padded, with BatchNorm."""

    def __init__(self, width: int = 64, levels: int = 4, classes: int = 2) -> None:
        super().__init__()
        self.enter = DoubleConvolution(3, width)
        self.down = nn.ModuleList(DoubleConvolution(width << i, width << (i + 1)) for i in range(levels))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(width << (i + 1), width << i, 2, stride=2) for i in range(levels))
        self.up = nn.ModuleList(DoubleConvolution(width << (i + 1), width << i) for i in range(levels))
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.enter(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for i in reversed(range(len(self.up))):
            x = self.up[i](torch.cat([skips[i], self.rise[i](x)], dim=1))
        return F.cross_entropy(self.leave(x).float(), targets)


def library(head: str, config: transformers.PretrainedConfig, loss: str | None = None) -> Callable[[], nn.Module]:
    """A Hugging Face model. The loss is chosen by name: left to itself the library looks it up with a warning that
    breaks the graph."""

    def make() -> nn.Module:
        with torch.device("meta"):
            model: nn.Module = getattr(transformers, head)(config)
        if loss is not None:
            model.loss_type = loss  # type: ignore[assignment]
        return model.to(torch.bfloat16).train()

    return make


def chunked(make: Callable[[], nn.Module], rows: int = 1024) -> Callable[[], nn.Module]:
    return lambda: WithChunkedLoss(make(), rows).train()


def integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def tokens(batch: int, length: int) -> Callable[[], Batch]:
    return lambda: {"input_ids": integers(batch, length), "labels": integers(batch, length)}


def images(batch: int, side: int = 224) -> Callable[[], Batch]:
    return lambda: {
        "pixel_values": torch.empty(batch, 3, side, side, dtype=torch.bfloat16, device="meta"),
        "labels": integers(batch),
    }


def segmentation(batch: int, side: int) -> Callable[[], Batch]:
    return lambda: {
        "images": torch.empty(batch, 3, side, side, dtype=torch.bfloat16, device="meta"),
        "targets": integers(batch, side, side),
    }


def unet() -> nn.Module:
    with torch.device("meta"):
        return UNet().to(torch.bfloat16).train()


def gpt2(**sizes: float) -> Callable[[], nn.Module]:
    return library(
        "GPT2LMHeadModel",
        transformers.GPT2Config(use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **sizes),
        "ForCausalLM",
    )


def llama(layers: int, width: int, inner: int) -> Callable[[], nn.Module]:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return library("LlamaForCausalLM", config, "ForCausalLM")


GPT2_12, GPT2_48 = gpt2(), gpt2(n_layer=48, n_embd=1600, n_head=25)
LLAMA_16, LLAMA_32 = llama(16, 2048, 8192), llama(32, 4096, 14336)
VIT = transformers.ViTConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=1000,
    problem_type="single_label_classification",
)  # fmt: skip
RESNET = transformers.ResNetConfig(num_labels=1000, problem_type="single_label_classification")
T5 = transformers.T5Config(
    d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0, use_cache=False
)
MIXTRAL = transformers.MixtralConfig(use_cache=False)

MODELS = (
    RealModel("GPT-2 12L", GPT2_12, tokens(8, 1024)),
    RealModel("GPT-2 12L, chunked loss", chunked(GPT2_12), tokens(8, 1024)),
    RealModel(
        "BERT",
        library("BertForMaskedLM", transformers.BertConfig(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)),
        tokens(32, 512),
    ),
    RealModel("ViT-L/16", library("ViTForImageClassification", VIT, "ForSequenceClassification"), images(64)),
    RealModel("ResNet-50", library("ResNetForImageClassification", RESNET, "ForSequenceClassification"), images(128)),
    RealModel("U-Net", unet, segmentation(8, 256)),
    RealModel("T5", library("T5ForConditionalGeneration", T5), tokens(8, 512)),
    RealModel("Llama 16L", LLAMA_16, tokens(4, 2048)),
    RealModel("Llama 16L, chunked loss", chunked(LLAMA_16), tokens(4, 2048)),
    RealModel("Llama 32L", LLAMA_32, tokens(1, 4096)),
    RealModel("Llama 32L, chunked loss", chunked(LLAMA_32), tokens(1, 4096)),
    RealModel("Mixtral", library("MixtralForCausalLM", MIXTRAL, "ForCausalLM"), tokens(1, 4096)),
    RealModel("GPT-2 48L", GPT2_48, tokens(4, 1024)),
    RealModel("GPT-2 48L, chunked loss", chunked(GPT2_48), tokens(4, 1024)),
    RealModel("GPT-2 48L, batch 32", GPT2_48, tokens(32, 1024)),
    RealModel("GPT-2 48L, batch 32, chunked loss", chunked(GPT2_48), tokens(32, 1024)),
)
BY_NAME = {model.name: model for model in MODELS}
