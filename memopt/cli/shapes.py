"""Shapes and dtypes of a model's inputs: as written on the command line (`input_ids=8x1024:int64`), or found for the
model where they are left out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.cli.early import UsageError

_WRITTEN = re.compile(r"(?:(?P<name>\w+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
# Inputs of these names hold whole numbers unless their dtype is given.
_WHOLE = re.compile(r"idx|y|targets?|tokens|.*(ids|labels?|mask|positions)")
BATCH, LENGTH = 8, 512
_AUDIO_SAMPLES, _AUDIO_FRAMES, _TEXT_OF_AUDIO = 16000, 3000, 32
# Heads of transformers that take one label for each sequence or picture; all others one for each token.
_ONE_LABEL = re.compile(r"For(Sequence|Image|Video|Audio)Classification")


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of one input."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> torch.Tensor:
        """A tensor without memory, for planning."""
        return torch.empty(self.sizes, dtype=self.dtype, device="meta")

    def random(self, device: torch.device, below: int = 2) -> torch.Tensor:
        """A random tensor: normally distributed, or whole numbers from 0 to `below`, excluded."""
        if self.dtype.is_floating_point:
            return torch.randn(self.sizes, device=device).to(self.dtype)
        return torch.randint(0, 2 if self.dtype is torch.bool else below, self.sizes, device=device).to(self.dtype)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.sizes))}:{str(self.dtype).removeprefix('torch.')}"


Shapes = dict[str, Shape]
"""Shapes by the names of the forward's parameters, or by "0", "1" and so on for positional inputs."""


def parse_shapes(written: Iterable[str]) -> Shapes:
    """The shapes as written on the command line, by the names of inputs, or by "0", "1" and so on if they have none.
    Raises `UsageError` for a text that is no shape, for one name twice, and where only some inputs have names."""
    shapes: Shapes = {}
    for number, text in enumerate(written):
        found = _WRITTEN.fullmatch(text.strip())
        if found is None:
            raise UsageError(
                f"--shape takes NAME=SIZES:DTYPE, such as input_ids=8x1024:int64, not {text!r}; sizes are whole "
                "numbers with an x between them"
            )
        name = found["name"] or str(number)
        if name in shapes:
            raise UsageError(f"--shape is given twice for {name!r}; give one shape for each input")
        sizes = tuple(map(int, found["sizes"].split("x")))
        if 0 in sizes:
            raise UsageError(f"--shape {text} has a size of 0; sizes are 1 or more")
        shapes[name] = Shape(sizes, _dtype(found["dtype"], name))
    if len({name.isdigit() for name in shapes if name != "target"}) > 1:
        named = ", ".join(name for name in shapes if not name.isdigit())
        raise UsageError(f"--shape: name all inputs or none, not only {named}")
    return shapes


def _dtype(written: str | None, name: str) -> torch.dtype:
    """The dtype written for the input `name`; if none is, int64 for names of whole numbers, else float32."""
    if written is None:
        return torch.int64 if _WHOLE.fullmatch(name) else torch.float32
    found = getattr(torch, _SHORT.get(written, written), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"--shape has no dtype {written!r}; int64, float32, bfloat16 and bool are some of torch's")
    return found


def shapes_of(inputs: Any, name: str, *, with_target: bool) -> Shapes:
    """The shapes of the example inputs that the user's function `name` gives with its model: a tensor, or a tuple, list
    or dict of these; `with_target`, a pair of such inputs and the second argument of the loss."""
    rest: Shapes = {}
    if with_target and isinstance(inputs, (tuple, list)) and len(inputs) == 2:
        inputs, target = inputs
        rest = shapes_of({"target": target}, name, with_target=False)
    inputs = inputs if isinstance(inputs, (tuple, list, Mapping)) else (inputs,)
    named = inputs.items() if isinstance(inputs, Mapping) else ((str(at), one) for at, one in enumerate(inputs))
    shapes = {}
    for key, value in named:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name} gives {type(value).__name__} as input {key!r}; inputs are a tensor, or a tuple or dict of "
                "tensors"
            )
        shapes[key] = Shape(tuple(value.shape), value.dtype)
    return {**shapes, **rest}


def with_defaults(model: nn.Module, given: Shapes) -> Shapes:
    """The shapes in `given`, or that of the model's main input, with those of the model's labels unless inputs are
    positional. Raises `UsageError` for inputs that the forward does not take, and for ones that it needs and that are
    not known."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    takes_any &= not hasattr(model, "main_input_name")  # models of transformers take keywords for their kernels
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
    missing = [name for name in needed(parameters.values()) if name not in shapes]
    if missing:
        give = " ".join(f"--shape {name}=SIZES:DTYPE" for name in missing)
        raise UsageError(f"the forward of {type(model).__name__} also needs {', '.join(missing)}; give {give}")
    return shapes


def _check_positional(model: nn.Module, given: int) -> None:
    """Raise `UsageError` where the model's forward takes fewer than `given` inputs by position, or needs more."""
    parameters = inspect.signature(model.forward).parameters.values()
    taken = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if given > len(taken) and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise UsageError(
            f"the forward of {type(model).__name__} takes {len(taken)} inputs at most ({', '.join(taken)}), not {given}"
        )
    missing = [name for name in needed(parameters) if name not in taken[:given]]
    if missing:
        told = f"the forward of {type(model).__name__} also needs {', '.join(missing)}"
        raise UsageError(f"{told}; give --shape once for each, in order")


def needed(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """The names of the parameters without which a function cannot be called."""
    named = (one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    return [one.name for one in named if one.default is one.empty]


def highest_values(model: nn.Module, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """For each input of whole numbers, the exclusive upper limit of its values; 2 where nothing is known."""
    config = getattr(model, "config", None)
    vocabulary = getattr(_text(config), "vocab_size", None) or 2
    classes = getattr(config, "num_labels", None) or 2
    highest = dict.fromkeys(shapes, 2)
    for name, shape in shapes.items():
        if name.endswith("input_ids") or name == "labels":
            highest[name] = classes if name == "labels" and len(shape.sizes) != 2 else vocabulary
    return highest


def _main_input(model: nn.Module) -> Shapes:
    """The name and usual shape of a Hugging Face model's main input. Raises `UsageError` where it is not known."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if name is None or config is None:
        raise UsageError(
            f"give the shapes of the inputs of {type(model).__name__}, such as --shape x=8x3x224x224:float32; its "
            f"forward takes {', '.join(inspect.signature(model.forward).parameters)}"
        )
    if name == "input_ids":
        return {name: Shape((BATCH, min(LENGTH, most_positions(model) or LENGTH)), torch.int64)}
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


def most_positions(model: nn.Module) -> int | None:
    """The longest sequence that the configuration of a Hugging Face model allows; None where none is known."""
    return getattr(_text(getattr(model, "config", None)), "max_position_embeddings", None)


def _labels(model: nn.Module, name: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of the labels `name` for a batch of these shapes; None where it is not known."""
    kind, first = type(model).__name__, next(iter(shapes.values())).sizes
    if not first:
        return None
    batch = first[0]
    if name != "labels" or _ONE_LABEL.search(kind):
        return Shape((batch,), torch.int64)
    if "input_ids" in shapes:
        return Shape(shapes["input_ids"].sizes, torch.int64)
    if "pixel_values" in shapes and "Segmentation" in kind:
        return Shape((batch, *shapes["pixel_values"].sizes[-2:]), torch.int64)
    return Shape((batch, _TEXT_OF_AUDIO), torch.int64) if hasattr(model, "config") else None


def _text(config: Any) -> Any:
    """The part of a Hugging Face configuration that describes the model's text side; any other configuration itself."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
