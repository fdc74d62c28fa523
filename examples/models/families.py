"""Small, real models of fourteen kinds with fixed seeds, and batches that train them; for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn

from examples.models import networks

Scale = Literal["usual", "longer", "shorter"]
Batch = dict[str, Any]
LENGTH: dict[Scale, float] = {"usual": 1.0, "longer": 1.5, "shorter": 0.5}


@dataclass(frozen=True)
class Family:
    """A kind of model. `make()` returns one in train mode; `model(**batch(scale))` gives the loss or has it.

    The scale of a batch is that of its sequences' length, or of its number of samples where the length is fixed.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[Scale], Batch]
    per_block_checkpoint: Callable[[nn.Module], None] | None = None
    """Turns on checkpointing around each block, in place, for comparison."""
    rounding: str = ""
    """Why gradients differ by rounding (up to 1e-6 of the largest) once torch.compile captures the model, although
    nothing is recomputed; empty where they are bitwise equal."""

    @property
    def repeated_blocks(self) -> bool:
        return self.per_block_checkpoint is not None

    def __str__(self) -> str:
        return self.name


def loss_of(output: Any) -> Tensor:
    """Return the loss, which a model returns as a tensor, as `.loss`, or first in a tuple."""
    if isinstance(output, Tensor):
        return output
    return output[0] if type(output) is tuple else output.loss


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch all dropout off, in place, also where modules hold its probability as a number; return the model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


def checkpoint_library_blocks(model: nn.Module) -> None:
    library_model: Any = model
    library_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def checkpoint_own_blocks(model: nn.Module) -> None:
    assert isinstance(model, networks.ResNet | networks.TiedEncoder | networks.RoutedModel)
    model.checkpointed = True


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build().train()

    return make


def library(kind: str, head: str, loss_type: str | None = None, **config: Any) -> Callable[[], nn.Module]:
    """A Hugging Face model from its configuration, with random weights.

    The loss is chosen by name here: left to itself the library looks it up at each call, with a warning that breaks
    the graph.
    """

    def build() -> nn.Module:
        model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**config))
        if loss_type is not None:
            model.loss_type = loss_type
        return cast(nn.Module, model)

    return seeded(build)


def integers(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def normals(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


VOCABULARY = 1024
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "use_cache": False,
}
ENCODER: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 256,
    "n_embd": 128,
    "n_layer": 6,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}

gpt2_sdpa = library("GPT2", "GPT2LMHeadModel", "ForCausalLM", attn_implementation="sdpa", **GPT2)
gpt2_eager = library("GPT2", "GPT2LMHeadModel", "ForCausalLM", attn_implementation="eager", **GPT2)
llama = library("Llama", "LlamaForCausalLM", "ForCausalLM", intermediate_size=352, **DECODER)
mixtral = library(
    "Mixtral", "MixtralForCausalLM", "ForCausalLM",
    intermediate_size=256, num_local_experts=4, num_experts_per_tok=2, **DECODER,
)  # fmt: skip
bert = library("Bert", "BertForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=256, **ENCODER)
vit = library(
    "ViT", "ViTForImageClassification", "ForSequenceClassification",
    image_size=64, patch_size=8, num_labels=10, problem_type="single_label_classification",
    hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **ENCODER,
)  # fmt: skip
t5 = library(
    "T5", "T5ForConditionalGeneration",
    vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4,
    decoder_start_token_id=0, use_cache=False,
)  # fmt: skip
whisper = library(
    "Whisper", "WhisperForConditionalGeneration",
    vocab_size=VOCABULARY, d_model=128, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=128,
    max_target_positions=128, dropout=0.1, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
)  # fmt: skip
clip = library(
    "CLIP", "CLIPModel",
    text_config=dict(ENCODER, vocab_size=VOCABULARY, max_position_embeddings=64, bos_token_id=0,
                     eos_token_id=VOCABULARY - 1),
    vision_config=dict(ENCODER, image_size=64, patch_size=8),
    projection_dim=64,
)  # fmt: skip


def causal_batch(scale: Scale, samples: int = 4, length: int = 96) -> Batch:
    tokens = integers(VOCABULARY, samples, int(length * LENGTH[scale]))
    return {"input_ids": tokens, "labels": tokens}


def padded_batch(scale: Scale) -> Batch:
    """The last ten tokens of the second sample are padding."""
    batch = causal_batch(scale)
    attention = torch.ones_like(batch["input_ids"])
    attention[1, -10:] = 0
    return {**batch, "attention_mask": attention, "labels": batch["labels"].masked_fill(attention == 0, -100)}


def masked_batch(scale: Scale) -> Batch:
    """One token in seven is predicted, and the last quarter of the second sample is padding."""
    tokens = integers(VOCABULARY, 4, int(96 * LENGTH[scale]))
    attention = torch.ones_like(tokens)
    attention[1, 3 * tokens.shape[1] // 4 :] = 0
    chosen = integers(7, *tokens.shape, seed=3) == 0
    return {
        "input_ids": tokens.masked_fill(chosen, 3),
        "attention_mask": attention,
        "labels": tokens.masked_fill(~chosen, -100),
    }


def image_batch(scale: Scale) -> Batch:
    samples = int(8 * LENGTH[scale])
    return {"pixel_values": normals(samples, 3, 64, 64), "labels": integers(10, samples)}


def t5_batch(scale: Scale) -> Batch:
    """The last quarter of the second source is padding."""
    source, target = int(96 * LENGTH[scale]), int(48 * LENGTH[scale])
    attention = torch.ones(3, source, dtype=torch.int64)
    attention[1, 3 * source // 4 :] = 0
    return {
        "input_ids": integers(VOCABULARY, 3, source),
        "attention_mask": attention,
        "labels": integers(VOCABULARY, 3, target, seed=3),
    }


def whisper_batch(scale: Scale) -> Batch:
    """The encoder takes sound of one length only, so the scale lengthens the text."""
    return {"input_features": normals(3, 80, 256), "labels": integers(VOCABULARY, 3, int(48 * LENGTH[scale]))}


def clip_batch(scale: Scale) -> Batch:
    tokens = integers(VOCABULARY - 1, 8, int(32 * LENGTH[scale]))
    tokens[:, -1] = VOCABULARY - 1  # the end-of-text token, at which the text is pooled
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": normals(8, 3, 64, 64),
        "return_loss": True,
    }


def resnet_batch(scale: Scale) -> Batch:
    samples = int(8 * LENGTH[scale])
    return {"images": normals(samples, 3, 96, 96), "labels": integers(100, samples)}


def unet_batch(scale: Scale) -> Batch:
    samples = int(2 * LENGTH[scale])
    return {"images": normals(samples, 3, 64, 64), "targets": normals(samples, 3, 64, 64, seed=3)}


def cell_batch(scale: Scale) -> Batch:
    return {"tokens": integers(512, 32, int(24 * LENGTH[scale]))}


def labelled_batch(scale: Scale) -> Batch:
    length = int(96 * LENGTH[scale])
    return {"tokens": integers(512, 6, length), "labels": integers(512, 6, length, seed=3)}


FAMILIES = (
    Family("gpt2-sdpa", gpt2_sdpa, causal_batch, checkpoint_library_blocks),
    Family("gpt2-eager", gpt2_eager, causal_batch, checkpoint_library_blocks),
    Family("llama", llama, causal_batch, checkpoint_library_blocks),
    Family("mixtral", mixtral, padded_batch, checkpoint_library_blocks),
    Family("bert", bert, masked_batch, checkpoint_library_blocks),
    Family("vit", vit, image_batch, checkpoint_library_blocks),
    Family("t5", t5, t5_batch, checkpoint_library_blocks),
    Family("whisper", whisper, whisper_batch, checkpoint_library_blocks),
    Family(
        "clip",
        clip,
        clip_batch,
        checkpoint_library_blocks,
        rounding="AOTAutograd adds a gradient of zeros for the logits, also an output; the sum takes their layout, "
        "and the gradient of logit_scale is reduced in another order.",
    ),
    Family("resnet", seeded(networks.ResNet), resnet_batch, checkpoint_own_blocks),
    Family("unet", seeded(networks.UNet), unet_batch),
    Family("lstm-cells", seeded(networks.CellLoop), cell_batch),
    Family("tied-encoder", seeded(networks.TiedEncoder), labelled_batch, checkpoint_own_blocks),
    Family("moe", seeded(networks.RoutedModel), labelled_batch, checkpoint_own_blocks),
)
BY_NAME = {family.name: family for family in FAMILIES}
