"""Attributes and batches of the model types for which the rules of `benchmarks.small_architectures` give no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

KEPT = frozenset(
    {"transformers_version", "num_labels", "num_return_sequences", "chunk_size_feed_forward", "num_feat_extract_layers"}
)
"""Attributes that always keep their value."""
FIRST = frozenset({
    "bert", "gpt2", "llama", "vit", "wav2vec2", "t5", "bart", "distilbert", "roberta", "mistral", "qwen2",
    "qwen3", "gemma2", "gemma3_text", "mixtral", "resnet", "convnext", "swin", "segformer", "detr", "whisper",
    "opt", "bloom", "gpt_neox", "phi3", "deberta-v2", "albert", "electra", "mamba", "longt5", "canine",
    "pegasus_x", "lxmert", "convnextv2", "modernbert", "bit", "regnet", "deit", "beit", "hubert", "wavlm",
    "speech_to_text", "audio-spectrogram-transformer", "clip", "patchtst",
})  # fmt: skip
"""Common types, and those that were wrong or refused once."""
NOT_TRAINED = frozenset({"emu3", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "musicgen", "musicgen_melody"})
"""Model types whose language model has a type of its own."""
UNLISTED = {
    "time_series_transformer": "TimeSeriesTransformerForPrediction", "informer": "InformerForPrediction",
    "autoformer": "AutoformerForPrediction", "patchtst": "PatchTSTForPrediction",
    "patchtsmixer": "PatchTSMixerForPrediction", "rwkv": "RwkvForCausalLM",
}  # fmt: skip
"""Classes that the mappings of transformers leave out."""
WITH_IMAGE = frozenset({"blip", "git", "vilt", "kosmos-2", "layoutlmv3"})
"""Those that read text always take an image with it."""
_RESNET = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
    "backbone_config": {
        "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1],
        "layer_type": "basic", "out_features": ["stage4"],
    },
}  # fmt: skip
_RESNET_LEVELS = {
    **_RESNET, "backbone_config": {**_RESNET["backbone_config"], "out_features": ["stage2", "stage3", "stage4"]},
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}}
_HALF_MROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}
_STEM = {
    "stem_channels": [3, 16, 16], "stage_in_channels": [16, 32, 64, 64], "stage_mid_channels": [16, 16, 32, 32],
    "stage_out_channels": [32, 64, 64, 64],
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4}, "mpnet": {"relative_attention_num_buckets": 32}, "speecht5": {"vocab_size": 96},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "moe_intermediate_size": 64,
                   "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "attention_hidden_size": 128,
              "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16, "n_mamba_heads": 8,
               "attention_hidden_size": 128, "attention_head_dim": 32, "num_mem_blocks": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]}, "xlstm": {"qk_dim_factor": 0.5, "num_heads": 4,
                                                                              "mlstm_round_up_to_multiple_of": 64},
    "gemma4_text": {"vocab_size_per_layer_input": 128}, "gemma3n_text": {"vocab_size_per_layer_input": 128},
    "time_series_transformer": {"prediction_length": 16, "context_length": 32, "d_model": 64,
                                "lags_sequence": [1, 2, 3], "num_time_features": 2},
    "informer": {"prediction_length": 16, "context_length": 32, "lags_sequence": [1, 2, 3], "num_time_features": 2},
    "autoformer": {"prediction_length": 16, "context_length": 32, "lags_sequence": [1, 2, 3], "num_time_features": 2},
    "patchtst": {"context_length": 64, "num_input_channels": 4, "prediction_length": 16, "patch_length": 8,
                 "patch_stride": 8},
    "patchtsmixer": {"context_length": 64, "num_input_channels": 4, "prediction_length": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "ministral": {"head_dim": 16},
    "rt_detr": {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64], "num_denoising": 10},
    "rt_detr_v2": {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64], "num_denoising": 10},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 48, 64]},
    "markuplm": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024, "tag_pad_id": 216,
                 "subs_pad_id": 1001, "max_depth": 50},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "udop": {"max_2d_position_embeddings": 1024}, "upernet": {"auxiliary_in_channels": 64, "hidden_size": 64},
    "detr": _RESNET, "conditional_detr": _RESNET, "dab-detr": _RESNET, "table-transformer": _RESNET,
    "deformable_detr": _RESNET_LEVELS, "omdet-turbo": _RESNET_LEVELS,
    "swin": {"window_size": 2, "embed_dim": 16},
    "donut-swin": {"window_size": 2, "embed_dim": 16}, "mask2former": {"backbone_config": {"window_size": 2}},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]}, "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "xlnet": {"d_head": 16},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8], "attention_head_size": 16},
    "prophetnet": {"num_buckets": 32, "relative_max_distance": 128},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 64},
    "hgnet_v2": {**_STEM, "hidden_sizes": [32, 64, 64, 64]},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "wav2vec2-bert": {"vocab_size": 64}, "wav2vec2-conformer": {"vocab_size": 64},
    "layoutlmv3": {"coordinate_size": 10, "shape_size": 12, "input_size": 64}, "lilt": {"hidden_size": 96},
    "hunyuan_v1_dense": {"head_dim": 16, "rope_parameters": _ROPE},
    "hunyuan_v1_moe": {"head_dim": 16, "rope_parameters": _ROPE},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2}, "xmod": {"default_language": "en_XX"},
    "qwen2_vl": _MROPE, "qwen2_5_vl": _MROPE, "colqwen2": {"vlm_config": _MROPE}, "paddleocr_vl": _MROPE,
    "glm4v": _HALF_MROPE, "glm46v": _HALF_MROPE, "glmga": _HALF_MROPE, "glm_ocr": _MROPE, "glm4v_moe": _HALF_MROPE,
    "perceiver": {"num_latents": 16, "d_latents": 64, "max_position_embeddings": 64},
    "longcat_flash": {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "qk_head_dim": 32, "head_dim": 16},
    "textnet": {"stem_out_channels": 16, "hidden_sizes": [16, 16, 32, 48, 64]},
    "pop2piano": {"d_model": 64},
}  # fmt: skip
"""Attributes in place of those that the rules give, in configurations inside, too."""


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
    batch = _text()
    return {**batch, "pixel_values": torch.randn(4, 3, 64, 64), "labels": batch["input_ids"].clone()}


def _vilt(config: Any) -> dict[str, Any]:
    return {**_text(32), "pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.rand(4, config.num_labels)}


def _perceiver(config: Any) -> dict[str, Any]:
    batch = _text()
    return {
        "inputs": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": batch["input_ids"].clone(),
    }


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


def _text(length: int = 64) -> dict[str, Any]:
    return {"input_ids": torch.randint(5, 90, (4, length)), "attention_mask": torch.ones(4, length, dtype=torch.long)}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lxmert": _lxmert, "visual_bert": _visual_bert, "vit_mae": _video, "git": _git, "vilt": _vilt,
    "perceiver": _perceiver, "pix2struct": _pix2struct, "patchtst": _patches, "patchtsmixer": _patches,
    "time_series_transformer": _series, "informer": _series, "autoformer": _series,
}  # fmt: skip
"""Batches of those whose forward takes something else."""
