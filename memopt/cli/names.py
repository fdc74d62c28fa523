"""What names on the command line stand for: a model, a loss function, a card or a number of gigabytes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from traceback import walk_tb
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from memopt.cli.early import HERE, UsageError, gigabytes, known_card, one_line
from memopt.cli.huggingface import architecture
from memopt.cli.shapes import needed
from memopt.compat.host import HOST
from memopt.device import device_here, hardware, hardware_of
from memopt.errors import GIB

Factory = Callable[[], tuple[nn.Module, Any]]
"""A function that makes a model and its example inputs; these are None where the command line describes them."""


def model_factory(name: str, settings: Iterable[str]) -> Factory:
    """A function that makes the model called `name` (see `MODEL` in the help text) and its example inputs, None unless
    a user's function returns some. `settings` are "name=value" texts: keywords of that function, or fields of the
    architecture's configuration. Raises `UsageError` for what cannot be used, also where the user's file raises an
    error."""
    values = dict(map(_setting, settings))
    module, colon, attribute = name.rpartition(":")
    if name.endswith(".py"):
        module, colon, attribute = name, ":", ""
    if not colon:
        plain = architecture(name, values)
        return lambda: (plain(), None)
    if not module:
        raise UsageError(
            f"{name!r} names no file or module before the colon; write file.py{name} or package.module{name}"
        )
    found = _attribute(_loaded(module), attribute, name)
    _check_arguments(found, values, name)

    def build() -> tuple[nn.Module, Any]:
        with _users_code(f"{name} raised %s when it was called"):
            return _checked(found(**values) if callable(found) and not isinstance(found, nn.Module) else found, name)

    return build


def _check_arguments(function: Any, values: Mapping[str, Any], name: str) -> None:
    """Raise `UsageError` where `values` lacks a required parameter of the function called `name`."""
    if isinstance(function, nn.Module) or not callable(function):
        return
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function in C without a signature
        return
    if missing := [one for one in needed(parameters) if one not in values]:
        give = " ".join(f"--set {argument}=VALUE" for argument in missing)
        raise UsageError(f"{name} needs {', '.join(map(repr, missing))}; give it with {give}")


def with_lora(build: Factory, rank: int, dtype: torch.dtype, *, packed: bool = False) -> Factory:
    """A function that makes the model of `build` frozen and in `dtype`, with LoRA adapters in fp32 on its linear
    layers, but not on experts that are stacked in one parameter: a forward with these is no single graph. If `packed`,
    the layers with adapters are 4-bit ones (`with_4_bits`)."""
    try:
        from peft import LoraConfig, inject_adapter_in_model

        if packed:
            import bitsandbytes  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"{'--bits' if packed else '--lora'} needs {error.name}: pip install {error.name}") from error

    def adapted() -> tuple[nn.Module, Any]:
        model: Any
        model, inputs = build()
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        left_out = [name for name, module in model.named_modules() if module is head and name]
        config = LoraConfig(r=rank, target_modules="all-linear", exclude_modules=left_out or None)
        with _users_code("--lora: peft raised %s"):
            model.to(dtype)
            # within a module that has no `config`, by which PEFT would find stacked experts
            wrapped: Any = nn.Sequential(with_4_bits(model, head) if packed else model)
            wrapped.is_loaded_in_4bit = packed
            inject_adapter_in_model(config, wrapped, low_cpu_mem_usage=True)
        if getattr(getattr(model, "config", None), "use_cache", False):
            model.config.use_cache = False  # as a Trainer has it; else the step returns all layers' keys and values
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model, inputs

    return adapted


def with_4_bits(model: nn.Module, head: nn.Module | None) -> nn.Module:
    """The model, on "meta", with linear layers of bitsandbytes in the place of all its own but the `head`, as QLoRA has
    them: 4 bits a weight (NF4), an 8-bit scale for each 64 of these, and a scale in fp32 for each 256 scales."""
    library: Any = importlib.import_module("bitsandbytes")
    layers, new_state = library.nn, library.functional.QuantState

    def made(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def quantised(inner: nn.Linear) -> nn.Module:
        shape, dtype = inner.weight.shape, inner.weight.dtype
        blocks = -(-shape.numel() // 64)
        nested = new_state(made(-(-blocks // 256)), code=made(256), blocksize=256, dtype=torch.float32)
        state = new_state(made(blocks, dtype=torch.uint8), shape, made(16), 64, "nf4", dtype, made(), nested)
        layer = layers.Linear4bit(*shape[::-1], bias=inner.bias is not None, compute_dtype=dtype, device="meta")
        values = made(-(-shape.numel() // 2), 1, dtype=torch.uint8)
        layer.weight = layers.Params4bit(values, quant_state=state, quant_type="nf4", module=layer, bnb_quantized=True)
        layer.bias = inner.bias
        layer.quant_state = state
        return layer

    made_of = dict[nn.Module, nn.Module]()
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if type(inner) is nn.Linear and inner is not head:
                if inner not in made_of:  # one that stands in two places stays one
                    made_of[inner] = quantised(inner)
                setattr(module, name, made_of[inner])
    return model


def on_meta(build: Factory) -> tuple[nn.Module, Any]:
    """The model that `build` makes, on "meta" and in training mode, and its example inputs (None if `build` gives
    none). A model that cannot be built on "meta" is built on the CPU first, and a line on stderr says so."""
    try:
        with torch.device("meta"):
            model, inputs = build()
    except UsageError as error:
        model, inputs = build()
        print(f"memopt: model built on the CPU, since building it on 'meta' failed: {error}", file=sys.stderr)
    return model.to("meta").train(), inputs


def named_function(name: str) -> Callable[..., Any]:
    """A loss function: one of `torch.nn.functional`, `package.module:function` or `file.py:function`."""
    if ":" not in name:
        found = getattr(torch.nn.functional, name, None)
        if not callable(found):
            raise UsageError(f"--loss: torch.nn.functional has no {name!r}; cross_entropy and mse_loss are some it has")
        return found
    module, _, attribute = name.rpartition(":")
    function: Callable[..., Any] = _attribute(_loaded(module), attribute, name)
    return function


def _setting(text: str) -> tuple[str, Any]:
    """A "name=value" text as name and Python value; a value that is no Python literal stays text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--set takes NAME=VALUE, such as n_layer=4, not {text!r}")
    try:
        return name, ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError):
        return name, value


def _loaded(module: str) -> ModuleType:
    """The user's module, by its dotted name or by the path of its file."""
    with _users_code(f"{module} raised %s when it was imported"):
        return _load_file(Path(module)) if module.endswith(".py") else _import(module)


def _import(name: str) -> ModuleType:
    """A module by its dotted name, looked for in the current folder too."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {name!r} (in Python's path or in this folder)") from None
        raise


def _load_file(path: Path) -> ModuleType:
    """The module that a Python file makes. From now on, modules in its folder can be imported, too."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loader = _SourceLoader(path.stem, str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes of the file are looked up by the name of their module
    loader.exec_module(module)
    return module


class _SourceLoader(SourceFileLoader):
    """Compiles a file's text at each load. Python would use cached bytecode if size and modification time, in whole
    seconds, are those of the cached file, which an edit may not change."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _attribute(module: ModuleType, name: str, written: str) -> Any:
    """The attribute `name` of a module; if that is empty, the only function or model class that the file defines."""
    own = [key for key, value in vars(module).items() if _makes_model(value, module) and not key.startswith("_")]
    if not name and len(own) == 1:
        name = own[0]
    if not hasattr(module, name):
        has = f"; it defines {', '.join(own)}" if own else ""
        wanted = f"{written} has no {name!r}" if name else f"{written}: name a function of the file after a colon"
        raise UsageError(wanted + has)
    return getattr(module, name)


def _makes_model(value: Any, module: ModuleType) -> bool:
    kind = inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, nn.Module))
    return kind and value.__module__ == module.__name__


def _checked(made: Any, name: str) -> tuple[nn.Module, Any]:
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} must return a torch.nn.Module, or a tuple of one and its inputs, not {type(model).__name__}"
        )
    return model, inputs


@contextlib.contextmanager
def _users_code(sentence: str) -> Iterator[None]:
    """Context for the user's code: what it prints goes to stderr, and its errors become a `UsageError`, whose text is
    `sentence` with the error in place of "%s"."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the command's answer
            yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        *_, (frame, line) = walk_tb(error.__traceback__)
        file = Path(frame.f_code.co_filename)
        place = f" (line {line} of {file.name})" if file != Path(__file__) else ""
        raise UsageError(sentence.replace("%s", one_line(error)) + place) from error


def card_named(name: str | None) -> str | None:
    """The name of the card in the hardware table, "rtx-4090" for "RTX 4090", "4090" or "rtx4090". None, for this
    machine's device, if `name` is None or one of `HERE`, which only a machine with a CUDA device has."""
    if name is None:
        return None
    if name.lower() in HERE:
        if device_here() == HOST:
            raise UsageError(f"--device {name}: this machine has no CUDA device; name a card, such as rtx-4090")
        return None
    return known_card(name)


def budget_gb(written: str | None, name: str | None) -> float:
    """The budget `written` on the command line as a number, in GB of 1024³ bytes; where it is None, the memory of the
    card `name` (None: of this machine's device). Raises `UsageError` where `written` is no number of gigabytes."""
    if written is not None:
        return gigabytes("--budget-gb", written)
    card = hardware_of(device_here()) if name is None else hardware(name)
    return card.memory_bytes / GIB
