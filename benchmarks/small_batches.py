"""Batches of the model types for which the rules of `benchmarks.small_architectures` give none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _lxmert(config: Any) -> dict[str, Any]:
    return {
        **_text(), "visual_feats": torch.randn(4, 10, config.visual_feat_dim), "visual_pos": torch.rand(4, 10, 4),
        "labels": torch.randint(0, config.num_qa_labels, (4,)),
    }  # fmt: skip


def _visual_bert(config: Any) -> dict[str, Any]:
    batch = _text()
    labels = torch.cat([batch["input_ids"], torch.full((4, 10), -100)], 1)
    return {
        **batch, "visual_embeds": torch.randn(4, 10, config.visual_embedding_dim), "labels": labels,
        "visual_attention_mask": torch.ones(4, 10, dtype=torch.long),
    }  # fmt: skip


def _video(config: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(12, 3, 64, 64)}


def _git(config: Any) -> dict[str, Any]:
    return {**_labelled_text(), "pixel_values": torch.randn(4, 3, 64, 64)}


def _vilt(config: Any) -> dict[str, Any]:
    return {**_text(32), "pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.rand(4, config.num_labels)}


def _perceiver(config: Any) -> dict[str, Any]:
    batch = _labelled_text()
    return {"inputs": batch.pop("input_ids"), **batch}


def _pix2struct(config: Any) -> dict[str, Any]:
    patches = torch.cat(
        [torch.randint(1, 8, (4, 32, 2)).float(), torch.randn(4, 32, config.vision_config.patch_embed_hidden_size)], 2
    )
    return {"flattened_patches": patches, "attention_mask": torch.ones(4, 32), "labels": torch.randint(5, 90, (4, 16))}


def _series(config: Any) -> dict[str, Any]:
    past = config.context_length + max(config.lags_sequence)
    return {
        "past_values": torch.randn(4, past), "past_time_features": torch.randn(4, past, config.num_time_features),
        "past_observed_mask": torch.ones(4, past), "future_values": torch.randn(4, config.prediction_length),
        "future_time_features": torch.randn(4, config.prediction_length, config.num_time_features),
    }  # fmt: skip


def _patches(config: Any) -> dict[str, Any]:
    length, channels = config.context_length, config.num_input_channels
    return {
        "past_values": torch.randn(4, length, channels),
        "future_values": torch.randn(4, config.prediction_length, channels),
    }


def _query_tokens(config: Any) -> dict[str, Any]:
    """Text after the tokens in whose place a Q-Former's queries come."""
    queries = config.num_query_tokens
    batch = _git(config)
    batch["input_ids"][:, :queries] = config.image_token_index
    batch["labels"][:, :queries] = -100
    return batch


def _instructed(config: Any) -> dict[str, Any]:
    text = _text(16)
    asked = {"qformer_input_ids": text["input_ids"], "qformer_attention_mask": text["attention_mask"]}
    return {**_query_tokens(config), **asked}


def _boxes_of_text(config: Any) -> dict[str, Any]:
    objects = [{"class_labels": torch.tensor([0, 1, 0]), "boxes": torch.rand(3, 4) * 0.3 + 0.3} for _ in range(2)]
    text = torch.tensor([[101, 50, 51, 1012, 60, 61, 1012, 102]] * 2)
    return {
        "input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": torch.randn(2, 3, 64, 64),
        "labels": objects,
    }  # fmt: skip


def _asked_for(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": torch.randn(2, 3, 64, 64), "task_inputs": torch.randint(5, 90, (2, config.task_seq_len)),
        "text_inputs": torch.randint(5, 90, (2, config.num_queries - config.text_encoder_n_ctx, 77)),
        "mask_labels": [(torch.rand(3, 64, 64) > 0.5).float() for _ in range(2)],
        "class_labels": [torch.randint(0, 2, (3,)) for _ in range(2)],
    }  # fmt: skip


def _images_in_text(config: Any) -> dict[str, Any]:
    return {
        **_labelled_text(), "pixel_values": torch.randn(4, 1, 3, 64, 64),
        "image_attention_mask": torch.ones(4, 64, 1, dtype=torch.long),
    }  # fmt: skip


def _image_within(config: Any) -> dict[str, Any]:
    places = torch.zeros(4, 64, dtype=torch.long)
    places[:, 1 : 1 + config.latent_query_num] = 1
    return {**_git(config), "image_embeds_position_mask": places}


def _image_queries(config: Any) -> dict[str, Any]:
    return {**_text(16), "pixel_values": torch.randn(4, 3, 64, 64), "return_loss": True}


def _written(config: Any) -> dict[str, Any]:
    labels = torch.randint(5, 90, (4, 16))
    return {"pixel_values": torch.randn(4, 3, 64, 64), "decoder_input_ids": labels, "labels": labels.clone()}


def _flat_patches(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    return {
        "pixel_values": torch.randn(12, 16, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(12, 16, dtype=torch.long), "spatial_shapes": torch.full((12, 2), 4),
        "labels": torch.randint(0, 2, (12,)),
    }  # fmt: skip


def _melody(config: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 64, config.d_model), "labels": torch.randint(5, 90, (2, 16))}


def _stacked(config: Any) -> dict[str, Any]:
    return {
        "input_features": torch.randn(2, 128, 320), "attention_mask": torch.ones(2, 128, dtype=torch.long),
        "labels": torch.randint(3, 30, (2, 5)),
    }  # fmt: skip


def _horizon(config: Any) -> dict[str, Any]:
    batch = {"past_values": list(torch.randn(4, config.context_length)), "freq": torch.zeros(4, dtype=torch.long)}
    return {**batch, "future_values": torch.randn(4, config.horizon_length)}


def _forecast(config: Any) -> dict[str, Any]:
    return {"past_values": list(torch.randn(4, config.context_length)), "future_values": torch.randn(4, 16)}


def _codes(config: Any) -> dict[str, Any]:
    """Return a batch of text and of audio codes for each channel."""
    channels = config.decoder_config.num_channels
    codes = torch.randint(5, 90, (4, 16, channels))
    return {**_text(), "decoder_input_ids": codes, "labels": codes.transpose(1, 2).reshape(4 * channels, 16)}


def _boxed(config: Any) -> dict[str, Any]:
    return {**_text(), "bbox": torch.rand(4, 64, 4), "labels": torch.randint(5, 90, (4, 16))}


def _of_types(config: Any) -> dict[str, Any]:
    """Return a batch of text whose token types say that no token is an image's."""
    return {**_labelled_text(), "mm_token_type_ids": torch.zeros(4, 64, dtype=torch.long)}


def _filmed(config: Any) -> dict[str, Any]:
    return {**_text(16), "pixel_values_videos": torch.randn(4, 16, 3, 64, 64), "return_loss": True}


def _text(length: int = 64) -> dict[str, Any]:
    return {"input_ids": torch.randint(5, 90, (4, length)), "attention_mask": torch.ones(4, length, dtype=torch.long)}


def _labelled_text() -> dict[str, Any]:
    batch = _text()
    return {**batch, "labels": batch["input_ids"].clone()}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lxmert": _lxmert, "visual_bert": _visual_bert, "vit_mae": _video, "git": _git, "vilt": _vilt,
    "perceiver": _perceiver, "pix2struct": _pix2struct, "patchtst": _patches, "patchtsmixer": _patches,
    "time_series_transformer": _series, "informer": _series, "autoformer": _series,
    "blip-2": _query_tokens, "instructblip": _instructed, "grounding-dino": _boxes_of_text,
    "mm-grounding-dino": _boxes_of_text, "oneformer": _asked_for, "idefics": _images_in_text,
    "kosmos-2": _image_within, "owlvit": _image_queries, "owlv2": _image_queries, "vision-encoder-decoder": _written,
    "pp_formulanet": _written, "siglip2": _flat_patches, "pop2piano": _melody, "timesfm": _horizon,
    "granite_speech5_ctc": _stacked, "timesfm2_5": _forecast, "dia": _codes, "molmo2": _of_types, "udop": _boxed,
    "videoprism": _filmed,
}  # fmt: skip
"""Batches of the model types whose forward takes other inputs."""
