"""Small configurations of every architecture that transformers can train, with a batch for each; random weights.

`names()` lists the model types that have a class whose forward takes labels. `build(name)` shrinks the configuration by
the names of its attributes, through all configurations inside it, and raises `NotBuilt` with the reason where no small
model comes out.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from benchmarks.small_batches import INPUTS
from benchmarks.small_exceptions import CHANGES, FIRST, KEPT, NOT_TRAINED, UNLISTED, WITH_IMAGE
from benchmarks.small_images import image_model, image_names, libraries

libraries()  # before a module of transformers imports torchvision

TASKS = (
    "SPEECH_SEQ_2_SEQ", "CTC", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT",
    "AUDIO_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "INSTANCE_SEGMENTATION", "ZERO_SHOT_OBJECT_DETECTION",
    "MASKED_IMAGE_MODELING", "CAUSAL_IMAGE_MODELING", "VISUAL_QUESTION_ANSWERING",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "TEXT_TO_SPECTROGRAM", "TIME_SERIES_PREDICTION", "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "PRETRAINING", "MULTIMODAL_LM",
)  # fmt: skip
"""The mappings of transformers in the order in which a model type's class is looked for."""
VOCABULARY, LENGTH, BATCH, IMAGES, IMAGE, SAMPLES = 128, 64, 4, 12, 64, 4000
MOST_PARAMETERS = 20_000_000
_TOKENS = re.compile(r"_token_id$|_token_index$|^token_id$|_id$|_index$")
_RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"^vocab_size$|_vocab_size$|^n_tokens$", lambda was: min(was, VOCABULARY)),
    (r"pos.*buckets|relative_attention_num_buckets|max_distance", lambda was: min(was, 16)),
    (r"position|^n_ctx$|^block_size$|^max_seq_len|^seq_length$|^model_max_length$", lambda was: min(was, 2 * LENGTH)),
    (r"sliding_window$|^attention_window$|^local_attention$|window_length", lambda was: min(was, 16)),
    (r"experts_per_tok|^moe_topk$|^moe_k$|^num_selected_experts$|^moe_top_k$|^top_k_experts$", lambda was: min(was, 2)),
    (r"^n_group$|^topk_group$|^num_expert_group", lambda was: 1),
    (r"shared_experts$", lambda was: min(was, 1)),
    (r"first_k_dense_replace|moe_layer_start|first_dense", lambda was: min(was, 1)),
    (r"interval|_period$|_frequency$|_pattern$|_every_n|_step$|_freq$", lambda was: min(was, 2)),
    (r"num_.*experts$|n_routed_experts$|^num_experts|^moe_num_experts$|^n_experts$", lambda was: min(was, 4)),
    (r"mlp_ratio|kernel|stride|^num_channels$|channels$|groups?$|^conv_|^d_conv|ratio|factor|dropout", lambda was: was),
    (r"kv_shared_layers", lambda was: 0),
    (r"rotary_dim$", lambda was: min(was, 8)),
    (r"key_value_heads|kv_heads|query_groups|num_kv", lambda was: 2 if was < 16 else 4),
    (r"heads?$|n_head|num_heads|attention_heads", lambda was: min(was, 4)),
    (r"head_dim|head_size|^d_kv$|^attention_key_size$|kv_channels|rope_dim", lambda was: min(was, 16)),
    (r"lora_rank|_rank$|low_rank", lambda was: min(was, 16)),
    (r"intermediate|ffn|ff_dim|d_ff|feedforward|n_inner|d_inner|ffw|mlp_dim|mlp_hidden", lambda was: min(was, 128)),
    (r"state_size|^d_state$|ssm_state", lambda was: min(was, 8)),
    (r"chunk_size", lambda was: min(was, 16)),
    (r"time_step", lambda was: was),
    (r"layers?$|^depth$|_depth$|n_layer|num_blocks|num_block_|layers_|num_hidden_groups", lambda was: min(was, 2)),
    (r"quer(y|ies)|latents?$|_tokens$|num_proposals", lambda was: min(was, 8)),
    (r"image_size|img_size|input_size|crop_size", lambda was: min(was, IMAGE)),
    (r"patch_size", lambda was: was if was <= 8 else 16),
    (r"hidden|embed|^dim$|_dim$|d_model|^width$|_size$|n_embd|channels_", lambda was: min(was, 64)),
)  # fmt: skip
"""The new value of an integer attribute, by the first pattern that its name matches."""
_LISTS: tuple[tuple[str, Callable[[list[Any]], list[Any]]], ...] = (
    (r"image_size|img_size|input_size", lambda was: [min(size, IMAGE) for size in was]),
    (r"patch_size", lambda was: [size if size <= 8 else 16 for size in was]),
    (r"^depths$|^num_blocks$|layers$|^num_conv_layers|blocks$", lambda was: [min(depth, 2) for depth in was]),
    (r"conv_dim|^tdnn_dim$", lambda was: [32] * len(was)),
    (r"num_heads|attention_heads|n_heads", lambda was: [min(2**at, heads) for at, heads in enumerate(was)]),
    (r"^hidden_sizes$|embed_dim|channels$|^widths$|hidden_channels|dims$",
     lambda was: [min(16 << at, size) for at, size in enumerate(was)]),
    (r"mrope_section", lambda was: [2, 3, 3]),
)  # fmt: skip


class NotBuilt(Exception):
    """No small model of this architecture that plain PyTorch trains comes out; the text says why."""


def names() -> list[str]:
    """Return the model types that have a class to train: the common ones, then one of each task in turn."""
    found = [name for name in CONFIG_MAPPING_NAMES if name not in NOT_TRAINED and class_name(name)]
    order: dict[str, tuple[bool, int, int]] = {}
    met: Counter[str] = Counter()
    for name in found:
        task = task_of(name)
        met[task] += 1
        order[name] = (name not in FIRST, met[task], TASKS.index(task))
    common = [name for name in found if name in FIRST]
    others = sorted((name for name in found if name not in FIRST), key=order.__getitem__)
    mixed = [name for pair in zip_longest(others, image_names()) for name in pair if name]
    return sorted(common, key=order.__getitem__) + mixed


def task_of(name: str) -> str:
    """Return the task that the class of `class_name` is listed under."""
    if ":" in name:
        return "IMAGE_CLASSIFICATION"
    return next((task for task in TASKS if name in _mapping(task)), "TIME_SERIES_PREDICTION")


def class_name(name: str) -> str | None:
    """Return the name of the class that is trained for a model type, or None if there is none with labels."""
    if name in UNLISTED:
        return UNLISTED[name]
    if ":" in name:
        return name.partition(":")[2]
    for task in TASKS:
        found = _mapping(task).get(name)
        if found:
            return found if isinstance(found, str) else found[0]
    return None


def _mapping(task: str) -> dict[str, Any]:
    return getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small model in training mode and a batch of keyword arguments, from seed 0.

    Raises `NotBuilt` with the reason.
    """
    chosen = class_name(name)
    if chosen is None:
        raise NotBuilt("no class with labels")
    try:
        if ":" in name:
            return image_model(name)
        kind = getattr(transformers, chosen)
        parameters = inspect.signature(kind.forward).parameters
        config = small_config(name)
        torch.manual_seed(0)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in kind(config).parameters())
        if count > MOST_PARAMETERS:
            raise NotBuilt(f"still {count / 1e6:.0f} million parameters when shrunk")
        torch.manual_seed(0)
        model = kind(config).train()
        batch = inputs(name, config, parameters)
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from error
    return model, batch


def small_config(name: str) -> Any:
    """Return the shrunk configuration of a model type."""
    kind = CONFIG_MAPPING[name]
    changed = _merged(shrunk(kind().to_dict()), CHANGES.get(name, {}))
    config = kind(**changed)
    config.return_dict = True
    if config.is_encoder_decoder:
        for token in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)
    return config


def _merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with those of `over` in their place, in configurations inside, too."""
    merged = dict(values)
    for key, value in over.items():
        inside = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if inside else value
    return merged


def shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a configuration that change, with their new values; configurations inside likewise."""
    changed: dict[str, Any] = {}
    names_of_tokens = 0
    layers = values.get("num_hidden_layers", values.get("num_layers"))
    for key, value in values.items():
        if key in KEPT or isinstance(value, bool) or value is None:
            continue
        if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
            inner = shrunk(value)
            same = {name: value[name] for name in ("model_type",) if value.get(name)}
            if len(value.get("stage_names", ())) in range(3, 7) and value.get("out_features"):
                same["out_features"] = value["out_features"]
            changed[key] = {**same, **inner}
        elif isinstance(value, dict) and "mrope_section" in value:
            changed[key] = {**value, "mrope_section": [2, 3, 3]}
        elif isinstance(value, int) and _TOKENS.search(key):
            if value >= VOCABULARY:
                names_of_tokens += 1
                changed[key] = VOCABULARY - names_of_tokens
        elif isinstance(value, int):
            new = _first(_RULES, key, value)
            if new != value:
                changed[key] = new
        elif isinstance(value, (list, tuple)) and len(value) == layers and layers > 2 and type(value[0]) is str:
            kinds = list(dict.fromkeys(value))
            changed[key] = [kinds[0], kinds[-1]]
        elif isinstance(value, (list, tuple)) and len(value) == layers and layers > 8 and type(value[0]) is int:
            changed[key] = [_first(_RULES, key, item) for item in value[:2]]
        elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            new = [min(v, VOCABULARY - 1) for v in value] if _TOKENS.search(key) else _first(_LISTS, key, list(value))
            if new != list(value):
                changed[key] = type(value)(new)
    return changed


def _first(rules: Any, key: str, value: Any) -> Any:
    return next((change(value) for pattern, change in rules if re.search(pattern, key)), value)


def inputs(name: str, config: Any, parameters: Any) -> dict[str, Any]:
    """Return a batch for the class of a model type: what its forward takes, and labels."""
    torch.manual_seed(1)
    if name in INPUTS:
        return INPUTS[name](config)
    task = task_of(name)
    batch: dict[str, Any] = {}
    if task in ("OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"):
        batch = _image(config, 2)
        return {**batch, **_objects(config, parameters)}
    by_ear = task in ("CTC", "AUDIO_CLASSIFICATION") or (task == "SPEECH_SEQ_2_SEQ" and config.is_encoder_decoder)
    if "input_ids" in parameters and not by_ear:
        batch["input_ids"] = torch.randint(5, _vocabulary(config) - 28, (BATCH, LENGTH))
        if "attention_mask" in parameters:
            batch["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
            batch["attention_mask"][-1, -8:] = 0
        if "bbox" in parameters:
            batch["bbox"] = torch.tensor([1, 2, 9, 12]).expand(BATCH, LENGTH, 4).contiguous()
        if name in WITH_IMAGE:
            batch["pixel_values"] = torch.randn(BATCH, 3, IMAGE, IMAGE)
        if "return_loss" in parameters and "labels" not in parameters:
            return {**batch, **_image(config, BATCH), "return_loss": True}
    elif task == "VIDEO_CLASSIFICATION" and "pixel_values" in parameters:
        batch["pixel_values"] = torch.randn(4, _find(config, "num_frames", 8), 3, IMAGE, IMAGE)
    elif "pixel_values" in parameters:
        batch = _image(config, IMAGES)
    elif "pixel_values_videos" in parameters:
        frames = getattr(config, "num_frames", getattr(config, "frames_per_clip", 8))
        batch["pixel_values_videos"] = torch.randn(2, frames, 3, IMAGE, IMAGE)
    elif "input_features" in parameters or "input_values" in parameters:
        batch = _audio(name, config, parameters)
        if name in ("parakeet_ctc", "lasr_ctc"):
            batch["attention_mask"] = torch.ones(batch["input_features"].shape[:2], dtype=torch.long)
    else:
        raise NotBuilt(f"no rule for a forward that takes {', '.join(list(parameters)[1:5])}")
    return {**batch, **_labels(task, config, parameters, batch)}


def _labels(task: str, config: Any, parameters: Any, batch: dict[str, Any]) -> dict[str, Any]:
    rows = next(iter(batch.values())).shape[0]
    classes = max(2, int(getattr(config, "num_labels", 2)))
    if "start_positions" in parameters:
        return {"start_positions": torch.arange(rows), "end_positions": torch.arange(rows) + 3}
    if "labels" not in parameters and "next_sentence_label" not in parameters:
        raise NotBuilt("its forward takes no labels")
    if task.endswith(("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")):
        return {"labels": torch.randint(0, classes, (rows,))}
    if task == "VIDEO_CLASSIFICATION":
        return {"labels": torch.randint(0, classes, (rows,))}
    if task == "SEMANTIC_SEGMENTATION":
        return {"labels": torch.randint(0, classes, (rows, IMAGE, IMAGE))}
    if task == "TOKEN_CLASSIFICATION":
        return {"labels": torch.randint(0, classes, tuple(batch["input_ids"].shape))}
    if task == "CTC":
        return {"labels": torch.randint(3, 30, (rows, 5))}
    if task == "SPEECH_SEQ_2_SEQ" and "input_ids" not in batch:
        return {"labels": torch.randint(5, 90, (rows, 16))}
    if "input_ids" in batch:
        return {"labels": batch["input_ids"].clone()}
    raise NotBuilt(f"no rule for labels of {task}")


def _vocabulary(config: Any) -> int:
    sizes = [getattr(one, "vocab_size", None) for one in (config, config.get_text_config())]
    return next((size for size in sizes if isinstance(size, int) and size > 40), VOCABULARY)


def _image(config: Any, rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, _find(config, "num_channels", 3), IMAGE, IMAGE)}


def _objects(config: Any, parameters: Any) -> dict[str, Any]:
    classes = max(2, int(getattr(config, "num_labels", 2)))
    if "mask_labels" in parameters:
        masks = [(torch.rand(3, IMAGE, IMAGE) > 0.5).float() for _ in range(2)]
        return {"mask_labels": masks, "class_labels": [torch.randint(0, classes, (3,)) for _ in range(2)]}
    if "labels" not in parameters:
        raise NotBuilt("its forward takes no labels")
    boxes = [torch.rand(3, 4) * 0.3 + 0.3 for _ in range(2)]
    return {"labels": [{"class_labels": torch.randint(0, classes, (3,)), "boxes": box} for box in boxes]}


def _audio(name: str, config: Any, parameters: Any) -> dict[str, Any]:
    keys = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    mels = next((found for key in keys if (found := _find(config, key, 0))), 0)
    if "input_values" in parameters and (not mels or name == "speecht5"):
        return {"input_values": torch.randn(2, SAMPLES)}
    if "input_values" in parameters:
        return {"input_values": torch.randn(2, _find(config, "max_length", 128), mels)}
    if (positions := getattr(config, "max_source_positions", 0)) and hasattr(config, "num_mel_bins"):
        return {"input_features": torch.randn(2, mels, 2 * positions)}
    return {"input_features": torch.randn(2, 128, mels or 80)}


def _find(config: Any, key: str, otherwise: int) -> int:
    """Return an attribute of a configuration or of one inside it."""
    for one in (config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))):
        value = getattr(one, key, None)
        if isinstance(value, int):
            return value
    return otherwise


def source_of(name: str) -> str:
    """Import the module that a model type's class comes from and return its name."""
    if ":" in name:
        return name.partition(":")[0]
    return importlib.import_module(getattr(transformers, class_name(name) or "").__module__).__name__
