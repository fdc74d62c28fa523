"""Attributes of the model types for which the rules of `benchmarks.small_architectures` give no model."""

from __future__ import annotations

from typing import Any

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
"""Model types that are common, or that were wrong or refused once."""
NOT_TRAINED = frozenset({"emu3", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "musicgen", "musicgen_melody"})
"""Model types whose language model has a type of its own."""
UNLISTED = {
    "time_series_transformer": "TimeSeriesTransformerForPrediction", "informer": "InformerForPrediction",
    "autoformer": "AutoformerForPrediction", "patchtst": "PatchTSTForPrediction",
    "patchtsmixer": "PatchTSMixerForPrediction", "rwkv": "RwkvForCausalLM",
    "owlvit": "OwlViTModel", "owlv2": "Owlv2Model",
}  # fmt: skip
"""Classes that the mappings of transformers leave out, and where the class that they name takes no labels."""
WITH_IMAGE = frozenset({"blip", "layoutlmv3"})
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
# With their own weights of 0.01, batch normalisation makes rounding errors of 1e8 of gradients that are exactly zero,
# those of biases before it.
_HGNET = {
    "backbone_config": {**_STEM, "embedding_size": 16, "hidden_sizes": [32, 64, 64, 64], "initializer_range": 0.15},
    "encoder_in_channels": [64, 64, 64], "decoder_in_channels": [64, 64, 64], "num_denoising": 10,
    "initializer_range": 0.15,
}  # fmt: skip
_STAGES = [f"stage{at}" for at in range(1, 5)]
_SWIN = {"backbone_config": {"window_size": 2, "num_layers": 4, "embed_dim": 16}}
_SWIN_LEVELS = {"backbone_config": {**_SWIN["backbone_config"], "out_features": _STAGES}}
_READ_BY_BERT = {**_SWIN, "text_config": {"vocab_size": 1100}}
_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
CHANGES: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4}, "mpnet": {"relative_attention_num_buckets": 32}, "speecht5": {"vocab_size": 96},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "moe_intermediate_size": 64,
                   "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 128,
              "num_hidden_layers": 4, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16, "n_mamba_heads": 8,
               "attention_hidden_size": 128, "attention_head_dim": 32, "num_mem_blocks": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "mode": "train"},
    "gemma4_text": {"vocab_size_per_layer_input": 128}, "gemma3n_text": {"vocab_size_per_layer_input": 128},
    "time_series_transformer": {"prediction_length": 16, "context_length": 32, "d_model": 64,
                                "lags_sequence": [1, 2, 3], "num_time_features": 2},
    "informer": {"prediction_length": 16, "context_length": 32, "lags_sequence": [1, 2, 3], "num_time_features": 2},
    "autoformer": {"prediction_length": 16, "context_length": 32, "lags_sequence": [1, 2, 3], "num_time_features": 2},
    "patchtst": {"context_length": 64, "num_input_channels": 4, "prediction_length": 16, "patch_length": 8,
                 "patch_stride": 8},
    "timesfm2_5": {"context_length": 256},
    "patchtsmixer": {"context_length": 64, "num_input_channels": 4, "prediction_length": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, "ministral": {"head_dim": 16},
    "rt_detr": {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64], "num_denoising": 10},
    "rt_detr_v2": {"encoder_in_channels": [32, 64, 128], "decoder_in_channels": [64, 64, 64], "num_denoising": 10},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 48, 64]},
    "markuplm": {"max_xpath_tag_unit_embeddings": 256, "max_xpath_subs_unit_embeddings": 1024, "tag_pad_id": 216,
                 "subs_pad_id": 1001, "max_depth": 50},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "udop": {"max_2d_position_embeddings": 1024, "relative_attention_num_buckets": 32,
             "relative_attention_max_distance": 128}, "upernet": {"auxiliary_in_channels": 64, "hidden_size": 64},
    "detr": _RESNET, "conditional_detr": _RESNET, "dab-detr": _RESNET, "table-transformer": _RESNET,
    "deformable_detr": _RESNET_LEVELS, "omdet-turbo": _RESNET_LEVELS,
    "swin": {"window_size": 2, "embed_dim": 16}, "donut-swin": {"window_size": 2, "embed_dim": 16},
    "mask2former": _SWIN_LEVELS, "grounding-dino": _READ_BY_BERT, "mm-grounding-dino": _READ_BY_BERT,
    "oneformer": {**_SWIN_LEVELS, "is_training": True, "num_queries": 20, "text_encoder_n_ctx": 4,
                  "text_encoder_width": 64, "conv_dim": 64, "mask_dim": 64},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]}, "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "xlnet": {"d_head": 16},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 8], "attention_head_size": 16},
    "prophetnet": {"num_buckets": 32, "relative_max_distance": 128},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "hgnet_v2": {**_STEM, "hidden_sizes": [32, 64, 64, 64]},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 32},
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
    "chameleon": {
        "vocabulary_map": {"<image>": 100, **{f"IMGIMG{chr(65 + code)}Z": 101 + code for code in range(10)}},
        "vq_config": {"base_channels": 32, "num_embeddings": 10, "resolution": 64, "channel_multiplier": [1, 1]},
    },
    "cohere_compass": {"text_config": _ROPES}, "cohere_compass_text": _ROPES,
    "d_fine": _HGNET, "deimv2": _HGNET,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}}, "mistral4": {"head_dim": 32, "qk_head_dim": 32},
    "dots3_note_text": {"head_dim": 32},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "hunyuan_vl": {"text_config": {"head_dim": 16, "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "hrm_text": {"num_hidden_layers": 16, "use_cache": False},
    "tipsv2_dpt": {"backbone_config": {"num_hidden_layers": 4, "reshape_hidden_states": False,
                                       "out_features": _STAGES}},
    "lw_detr": {"projector_scale_factors": [1.0],
                "backbone_config": {"num_hidden_layers": 4, "window_block_indices": [0, 2], "num_windows": 4,
                                    "num_windows_side": 2, "out_features": ["stage2", "stage4"]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 4}, "timm_wrapper": {"architecture": "test_vit"},
    "blip-2": {"image_token_index": 100}, "instructblip": {"image_token_index": 100},
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 90},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "granite_speech5_ctc": {"encoder_config": {"num_key_value_heads": 4}},
    "janus": {"vq_config": {"base_channels": 32, "latent_channels": 32, "channel_multiplier": [1, 1]}},
    "align": {"vision_config": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
              "projection_dim": 80},
}  # fmt: skip
"""Attributes in place of those that the rules give, in configurations inside, too."""
