"""Inputs that the command line leaves out: the main input of a Hugging Face model, and the labels of its loss."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from memopt.cli.failures import UsageError
from memopt.cli.shapes import Shape, Shapes

BATCH, LENGTH = 8, 512
_AUDIO_SAMPLES, _AUDIO_FRAMES, _TEXT_OF_AUDIO = 16000, 3000, 32
# Heads of transformers that take one label for each sequence or picture; all others one for each token.
_ONE_LABEL = re.compile(r"For(Sequence|Image|Video|Audio)Classification")


def with_defaults(model: nn.Module, given: Shapes) -> Shapes:
    """The shapes that are given, and those of the model's main input and labels where they are left out.

    Raises `UsageError` for inputs that the model's forward does not take, for those that it needs and that are not
    given, and where nothing is known of them.
    """
    parameters = inspect.signature(model.forward).parameters
    # Those of transformers take keywords for their kernels, which are no inputs.
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and not hasattr(
        model, "main_input_name"
    )
    for name in given:
        if not name.isdigit() and name != "target" and name not in parameters and not takes_any:
            raise UsageError(f"{type(model).__name__} takes no {name!r}; its forward takes {', '.join(parameters)}")
    shapes = dict(given) or _main_input(model)
    if any(name.isdigit() for name in shapes):
        _check_positional(model, sum(name.isdigit() for name in shapes))
        return shapes
    for name in ("labels", "start_positions", "end_positions"):
        if name in parameters and name not in shapes and (labels := _labels(model, name, shapes)) is not None:
            shapes[name] = labels
    missing = [name for name in _needed(parameters.values()) if name not in shapes]
    if missing:
        give = " ".join(f"--shape {name}=SIZES:DTYPE" for name in missing)
        raise UsageError(f"the forward of {type(model).__name__} also needs {', '.join(missing)}; give {give}")
    return shapes


def _check_positional(model: nn.Module, given: int) -> None:
    """Raise `UsageError` where the model's forward takes fewer inputs by position, or needs more."""
    parameters = inspect.signature(model.forward).parameters.values()
    taken = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if given > len(taken) and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise UsageError(
            f"the forward of {type(model).__name__} takes {len(taken)} inputs at most ({', '.join(taken)}), not {given}"
        )
    missing = [name for name in _needed(parameters) if name not in taken[:given]]
    if missing:
        needed = f"the forward of {type(model).__name__} also needs {', '.join(missing)}"
        raise UsageError(f"{needed}; give --shape once for each, in order")


def _needed(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The names of the parameters without which a function cannot be called."""
    return [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def highest_values(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """For each input of whole numbers, the number that its values are below: the vocabulary for tokens, the number of
    labels for classes, 2 where nothing is known."""
    config = getattr(model, "config", None)
    vocabulary = getattr(_text(config), "vocab_size", None) or 2
    classes = getattr(config, "num_labels", None) or 2
    highest = dict.fromkeys(shapes, 2)
    for name, shape in shapes.items():
        if name.endswith("input_ids") or (name == "labels" and len(shape.sizes) == 2):
            highest[name] = vocabulary
        elif name == "labels":
            highest[name] = classes
    return highest


def _main_input(model: nn.Module) -> Shapes:
    """The shape of the input that a Hugging Face model is about, at its usual size."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if name is None or config is None:
        raise UsageError(
            f"give the shapes of the inputs of {type(model).__name__}, such as --shape x=8x3x224x224:float32; its "
            f"forward takes {', '.join(inspect.signature(model.forward).parameters)}"
        )
    if name == "input_ids":
        longest = getattr(_text(config), "max_position_embeddings", None) or LENGTH
        return {name: Shape((BATCH, min(LENGTH, longest)), torch.int64)}
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or 224
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return {name: Shape((BATCH, getattr(vision, "num_channels", 3), height, width), torch.float32)}
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or 80
        return {name: Shape((BATCH, bins, _AUDIO_FRAMES), torch.float32)}
    if name == "input_values":
        return {name: Shape((BATCH, _AUDIO_SAMPLES), torch.float32)}
    raise UsageError(f"give the shape of {name!r} of {type(model).__name__}: --shape {name}=SIZES:DTYPE")


def _labels(model: nn.Module, name: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of labels for a batch of these shapes; None for models that are not known to have such ones."""
    batch = next(iter(shapes.values())).sizes[0]
    kind = type(model).__name__
    if name != "labels" or _ONE_LABEL.search(kind):
        return Shape((batch,), torch.int64)
    if "input_ids" in shapes:
        return Shape(shapes["input_ids"].sizes, torch.int64)
    if "pixel_values" in shapes and "Segmentation" in kind:
        return Shape((batch, *shapes["pixel_values"].sizes[-2:]), torch.int64)
    return Shape((batch, _TEXT_OF_AUDIO), torch.int64) if hasattr(model, "config") else None


def _text(config: Any) -> Any:
    """The part of a Hugging Face configuration that is about text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
