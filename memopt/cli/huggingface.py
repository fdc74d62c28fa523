"""Architectures of `transformers` with random weights, by the name of a model type, a class or a configuration file."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.cli.early import UsageError, is_cached, no_model, one_line, squeezed

if TYPE_CHECKING:
    from torch import nn

# The kinds of models that return a loss; of a model type, the first kind here that it has is built.
_HEADS = (
    "MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", "CTC",
    "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "SEMANTIC_SEGMENTATION",
)  # fmt: skip
_DECODED_HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")


def architecture(name: str, settings: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """A function that builds an architecture with random weights; nothing is downloaded. `name` is a model type
    ("gpt2"), a class of transformers, the path of a `config.json` or of its folder, or a model of the hub whose
    configuration is in the local cache; `settings` are fields of the configuration to change. Raises `UsageError`
    without transformers and for an unknown name; the returned function for unknown settings, and where the model cannot
    be built."""
    try:
        import transformers
    except ImportError as error:
        why = "" if error.name == "transformers" else f", whose import fails here ({one_line(error)})"
        raise UsageError(
            f"models by name, such as {name!r}, need transformers{why}: pip install 'memopt[transformers]'"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    make_config, kind = _configuration(transformers, name)

    def build() -> nn.Module:
        try:
            plain = make_config()
        except Exception as error:
            raise UsageError(f"the configuration of {name} cannot be used: {one_line(error)}") from error
        _check_settings(plain, settings, name)
        try:
            config = make_config(**settings)  # not set afterwards: other fields may depend on them
            model: nn.Module = (kind or _head(transformers, config))(config)
            model.tie_weights()  # type: ignore[operator]  # transformers 5.0 does not do so on "meta"
            return model
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{name} cannot be built from its configuration: {one_line(error)}") from error

    return build


def _configuration(transformers: Any, name: str) -> tuple[Callable[..., Any], Any]:
    """A function that makes the configuration, given fields to change; and the model's class, if `name` is one."""
    path = Path(name)
    if name and path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        if not path.is_file():
            raise UsageError(f"there is no file {path}")
        return functools.partial(transformers.AutoConfig.from_pretrained, str(path), local_files_only=True), None
    types = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    wanted = squeezed(name)
    for known in types:
        if squeezed(known) == wanted:
            return functools.partial(transformers.AutoConfig.for_model, known), None
    kind = getattr(transformers, name, None) if re.fullmatch(r"[A-Z]\w+", name) else None
    if kind is not None and getattr(kind, "config_class", None) is not None:
        return kind.config_class, kind
    if name and is_cached(name):
        return functools.partial(transformers.AutoConfig.from_pretrained, name, local_files_only=True), None
    raise no_model(name, types)


def _check_settings(config: Any, settings: Mapping[str, Any], name: str) -> None:
    """Raise `UsageError` for a setting that the configuration does not have."""
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    for field in settings:
        if field not in known and not hasattr(config, field):
            close = difflib.get_close_matches(field, known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"--set: the configuration of {name} has no {field!r}{meant}")


def _head(transformers: Any, config: Any) -> Any:
    """The class of the model for a configuration: the first of its `architectures`, or of `_HEADS`, that there is."""
    for named in config.architectures or ():
        if hasattr(transformers, named):
            return getattr(transformers, named)
    first = _DECODED_HEADS if getattr(config, "is_encoder_decoder", False) else ()
    for name in dict.fromkeys([*first, *_HEADS]):
        classes = getattr(transformers, f"MODEL_FOR_{name}_MAPPING", {})
        if type(config) in classes:
            return classes[type(config)]
    raise UsageError(
        f"memopt does not know which class of the transformers library gives a loss for {config.model_type}; name one "
        "in place of the model, such as BertForMaskedLM, or a function of yours that builds the model, as "
        "file.py:function"
    )
