"""The error and the exit codes of all commands, and checks of a command line that need neither torch nor transformers,
whose import takes seconds: a mistake is reported at once."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

FAILED, BAD_USAGE, DOES_NOT_FIT = 1, 2, 3
"""Exit codes."""


class UsageError(ValueError):
    """Raised for an argument of the command that cannot be used; the message says which one and what is expected."""


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


HERE = ("cuda", "gpu")
CARDS = (
    "a100-40", "a100-80", "b200", "h100", "h200", "l4", "rtx-3060", "rtx-3090", "rtx-4090", "rtx-5090", "t4", "cpu",
)  # fmt: skip
"""The names that `memopt.device.known_hardware` returns, written out, since that loads torch."""

LEVERS = (
    "recompute", "reinplace", "fused_ops", "fused_attention", "chunked_loss", "tiles", "microbatch",
    "expandable_segments", "offload_activations", "offload_parameters", "fp8", "fp8_delayed", "fp8_block", "mxfp8",
    "fp8_activations", "bf16_parameters", "low_bit_optimizer", "offload_optimizer", "optimizer_in_backward", "plain",
)  # fmt: skip
"""The names that `memopt.levers.all.allowable` returns, written out, since that loads torch."""
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "none", "radam",
    "rmsprop", "rprop", "sgd", "sparseadam",
)  # fmt: skip
"""The names of `torch.optim`'s optimizers whose step needs no closure, and "none"."""


def check_early(model: str, device: str | None, budget: str | None) -> None:
    """Raise `UsageError` for a device, a budget or a model's name that cannot be right."""
    if device is not None and device.lower() not in HERE:
        known_card(device)
    if budget is not None:
        gigabytes("--budget-gb", budget)
    _check_model(model)


def known_card(name: str) -> str:
    """The name of a card in the hardware table, for a spelling such as "RTX 4090" or "4090". Raises `UsageError` where
    it fits no card or several."""
    wanted = _plain(name)
    plain = {_plain(known): known for known in CARDS}
    if wanted in plain:
        return plain[wanted]
    within = [known for short, known in plain.items() if wanted and wanted in short]
    if len(within) == 1:
        return within[0]
    if within:
        raise UsageError(f"--device {name} may be {' or '.join(within)}; name one of them")
    close = [plain[short] for short in difflib.get_close_matches(wanted, plain, n=1)]
    meant = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"no card is named {name!r}{meant or '; known are ' + ', '.join(CARDS)}")


def _plain(name: str) -> str:
    """A name in small letters and digits, without the maker's brands ("nvidia", "geforce", "tesla")."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def gigabytes(option: str, written: str) -> float:
    """The number of gigabytes written for an option: "8", "7.5" or "8GB". Raises `UsageError` for another text."""
    number = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:gi?b?)?\s*", written, re.IGNORECASE)
    if number is None or float(number[1]) == 0:
        raise UsageError(f"{option} takes a number of gigabytes, such as 8 or 7.5, not {written!r}")
    return float(number[1])


def _check_model(name: str) -> None:
    """Raise `UsageError` for a file or a module that is not there, and for a name that transformers does not have."""
    module, colon, _ = name.rpartition(":")
    module = name if name.endswith(".py") else module
    if module.endswith(".py") or name.endswith(".json"):
        if not Path(module or name).is_file():
            raise UsageError(f"there is no file {module or name}")
    elif colon and (first := module.partition(".")[0]):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        if first not in sys.modules and find_spec(first) is None:
            raise UsageError(f"there is no module {module!r} (in Python's path or in this folder)")
    elif name and not colon and not Path(name).exists() and not name.endswith((".pickle", ".pkl")):
        _check_architecture(name)


def _check_architecture(name: str) -> None:
    """Raise `UsageError` for a name of no model in transformers or in the cache of the Hugging Face hub."""
    types, texts = _model_types()
    if not types or squeezed(name) in set(map(squeezed, types)) or is_cached(name):
        return
    models = _models_folder()
    if re.fullmatch(r"[A-Z]\w+", name) and (
        any(f'"{name}"' in text for text in texts)
        or any(f"class {name}(" in path.read_text(encoding="utf-8") for path in models.glob("*/modeling_*.py"))
    ):
        return
    raise no_model(name, types)


def _models_folder() -> Path:
    """The folder of transformers' models; without transformers, one that does not exist."""
    spec = find_spec("transformers")
    return Path("no transformers" if spec is None or spec.origin is None else spec.origin).parent / "models"


def _model_types() -> tuple[set[str], list[str]]:
    """The model types of transformers, and the texts of the files that name them, which are read since importing them
    loads torch. Both are empty without transformers."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((_models_folder() / "auto").glob("*.py"))]
    return {found for text in texts for found in re.findall(r'"([\w.-]+)"[,:] "\w+Config"', text)}, texts


def model_types() -> list[str]:
    """The model types of transformers, sorted, for completion in the shell."""
    return sorted(_model_types()[0])


def is_cached(name: str) -> bool:
    """Whether the configuration of a model of the Hugging Face hub ("bert-base-cased") is in the local cache."""
    return any(_hub_cache().glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))


def _hub_cache() -> Path:
    """The folder in which huggingface_hub keeps what it has downloaded."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def no_model(name: str, types: Iterable[str]) -> UsageError:
    """The error for a name that no model has; it suggests the most similar ones of `types`."""
    close = difflib.get_close_matches(name.lower(), types, n=3)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) or "-" in name:
        others = f" (it has {', '.join(close)})" if close else ""
        return UsageError(
            f"no model is named {name!r}: transformers has no such model type{others}, and the cache of the Hugging "
            f"Face hub ({_hub_cache()}) has no configuration of it; memopt downloads nothing: run hf download "
            f"{name} config.json, or give the path of a config.json"
        )
    if close:
        return UsageError(f"no model is named {name!r}; did you mean {' or '.join(close)}?")
    return UsageError(
        f"{f'no model is named {name!r}' if name else 'MODEL is empty'}; name a model type of transformers (gpt2, "
        "llama, bert, …), a config.json, package.module:function or file.py:function"
    )


def squeezed(name: str) -> str:
    """A name in lower case without any other characters than letters and digits, to compare spellings."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
