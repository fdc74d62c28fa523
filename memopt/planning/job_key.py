"""Keys for everything that a plan depends on, equal in all processes; and what must be equal on all ranks."""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import passes
from memopt.account.account import account_of
from memopt.capture.caller_modes import CallerModes
from memopt.capture.inputs import Call, call_signature, tensor_numbers, tensors_in
from memopt.compat.card import expandable_segments, may_turn_on_expandable_segments
from memopt.compat.tensors import is_opaque, spread_of
from memopt.device import Hardware, hardware_of
from memopt.device.devices import device_of
from memopt.levers import LEVERS, Lever
from memopt.planning.options import Options
from memopt.planning.terms import Situation
from memopt.units import size
from passes.graphs.decisions import MARKED
from passes.ops.fp8_kernels import library

_OWN_SOURCES = (Path(__file__).parents[1], Path(passes.__file__).parent)


@dataclass(frozen=True)
class PlanJob:
    """A training call and everything that its plan depends on; makes the keys under which plans are stored."""

    model: nn.Module
    call: Call
    state: Situation
    options: Options
    card: Hardware
    loss_fn: Callable[..., Any] | None
    further: object
    """Other values that the plan depends on, identified by their `repr`."""

    def key(self, graph_module: fx.GraphModule) -> str | None:
        """The key, a hash, of the call with the graph that Dynamo captured of it.

        None where another process could not recognise the call: an optimizer made by a function, changing sizes."""
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes if node.op == "placeholder"]
        if any(isinstance(value, torch.SymInt) for value in values):
            return None
        return self._hash(graph_text(graph_module), list(map(_value, values)))

    def key_of_ranks(self, graph_module: fx.GraphModule) -> str | None:
        """A key like `key` that is equal on all ranks with equal shapes, whatever times were measured here."""
        card = hardware_of(next(self.model.parameters()).device) if self.options.calibrate else self.card
        return replace(self, card=card).key(graph_module)

    def sketch(self) -> str | None:
        """A key that needs no capture, made from the model's structure, plain attributes and source. Calls with equal
        sketches most likely have equal graphs; a plan found by its sketch must be checked by `key` before it runs. None
        where another process could not recognise the call, as for an optimizer made by a function."""
        modules = dict(self.model.named_modules())
        attributes = [(name, _attributes(module)) for name, module in modules.items()]
        numbers = tensor_numbers(self.call)
        call = call_signature(self.call), [numbers[id(tensor)] for tensor in tensors_in(self.call)]
        return self._hash(
            attributes, sources_of(self.model, self.loss_fn), call, getattr(self.loss_fn, "__qualname__", None)
        )

    def _hash(self, *parts: object) -> str | None:
        """The hash of everything but the call's graph, and of `parts`; None if a text is not equal in all processes."""
        options, state, card = self.options, self.state, self.card
        segments = expandable_segments(), may_turn_on_expandable_segments()
        optimizer = _optimizer(options.optimizer)
        text = repr((
            own_digest(),
            _torch(),
            [(name, type(module).__qualname__, module.training) for name, module in self.model.named_modules()],
            [(name, _value(value), id(value) in state.hooked) for name, value in self.model.named_parameters()],
            account_of(self.model, tensors_in(self.call), None, card),
            replace(state, elsewhere=None, hooked=frozenset()),
            optimizer,
            options.planned_by,
            [_own(extension) for extension in (*options.passes, *options.solvers, *_parts_of_own(options.levers))],
            sorted(map(str, MARKED)),
            (card, device_of(card).caching and (segments, library()), CallerModes.now(), self.further),
            parts,
        ))  # fmt: skip
        if optimizer is None or re.search(r" at 0x[0-9a-f]+>", text):
            return None
        return hashlib.sha256(text.encode()).hexdigest()


def sources_of(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[str]:
    """Hashes of the files that define the classes of a model and its loss function, sorted."""
    kinds: set[Any] = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds |= {type(loss_fn)} if isinstance(loss_fn, nn.Module) else set()
    kinds |= {loss_fn} if inspect.isfunction(loss_fn) else set()
    return sorted({_file_digest(source) for kind in kinds if (source := _source_file(kind))})


def graph_text(graph_module: fx.GraphModule) -> str:
    """Operators, arguments, shapes, dtypes and strides of a graph and its inner graphs, without comments on sources."""
    text = graph_module.print_readable(print_output=False, include_stride=True, include_device=True)
    return re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)


@functools.cache
def own_digest() -> str:
    """A hash of the source of memopt and its passes; of the compiled files where there is no source."""
    digest = hashlib.sha256()
    for folder in _OWN_SOURCES:
        for file in sorted(file for file in folder.rglob("*.py*") if file.parent.name != "__pycache__"):
            digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _torch() -> tuple[Any, ...]:
    """Versions and settings of torch that determine which kernels run, and with them workspaces and graphs."""
    backends = torch.backends
    return (
        sys.version_info[:2],
        torch.__version__,
        torch.get_num_threads(),
        backends.cpu.get_cpu_capability(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        backends.mkldnn.enabled,
        (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32),
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module's forward may read besides its parameters; functions by their type only."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {name: (_text(value), _attribute_texts(value)) for name, value in own.items()}


def _attribute_texts(value: Any) -> dict[str, Any]:
    """The texts of a value's own attributes, which it may not print; without hashes, which differ between processes."""
    return {name: _text(inner) for name, inner in getattr(value, "__dict__", {}).items() if "hash" not in name}


def _text(value: Any) -> Any:
    """A value's `repr`, or its type's name where the `repr` contains an address."""
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _source_file(kind: Any) -> Path | None:
    """The source file of a class or function; None for torch's own, and where there is no file."""
    try:
        return None if kind.__module__.startswith("torch.") else Path(inspect.getfile(kind))
    except (OSError, TypeError):  # built in, or defined in an interactive session
        return None


@functools.cache
def _file_digest(file: Path) -> str:
    """A hash of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _value(value: Any) -> Any:
    """A value in a key: of a tensor its layout and kind, "a mesh" for a device mesh, else the value itself."""
    if not isinstance(value, torch.Tensor):
        return "a mesh" if is_opaque(value) else value
    kind = (tuple(value.shape), value.stride(), value.dtype, value.device.type)
    return (*kind, value.requires_grad, isinstance(value, nn.Parameter), *spread_of(value))


def _optimizer(optimizer: Any) -> Any | None:
    """The facts that an optimizer's memory depends on; None if unknown, as for a function that makes one."""
    if optimizer is None or isinstance(optimizer, str):
        return (optimizer,)
    if isinstance(optimizer, type):
        return f"{optimizer.__module__}.{optimizer.__qualname__}", _source(optimizer)
    if isinstance(optimizer, functools.partial):
        inner = _optimizer(optimizer.func)
        return None if inner is None else (inner, optimizer.args, _settings(optimizer.keywords))
    if isinstance(optimizer, torch.optim.Optimizer):
        return _optimizer(type(optimizer)), [_group(group, optimizer.state) for group in optimizer.param_groups]
    return None


def _parts_of_own(levers: Sequence[Lever]) -> list[object]:
    """The user's own levers, and their deciders."""
    own = [lever for lever in levers if lever.name not in LEVERS]
    deciders = [lever.graph.deciders for lever in own if lever.graph is not None]
    return [*own, *(decide for some in deciders if isinstance(some, tuple) for decide in some)]


def _own(extension: object) -> tuple[str, str, str, str]:
    """The user's pass, solver or part of a lever in a key: its `repr`, module, class and source."""
    kind = type(extension)
    return repr(extension), kind.__module__, kind.__qualname__, _source(kind)


def _source(kind: type) -> str:
    """The source of a class; "" for torch's own; a text with an address, which has no hash, if none is found."""
    try:
        return "" if kind.__module__.startswith("torch.") else inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind!r} at 0x0>"  # defined in an interactive session


def _group(group: Mapping[str, Any], state: Mapping[Any, Any]) -> Any:
    """The settings of a parameter group and the facts about its state."""
    parameters: Sequence[torch.Tensor] = group["params"]
    held = [
        {name: _value(value) for name, value in state.get(parameter, {}).items() if name != "step"}
        for parameter in parameters
    ]
    return _settings({name: value for name, value in group.items() if name != "params"}), held


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with learning rates as their types: their values change between steps, and affect no memory."""
    return {name: type(value) if name in ("lr", "initial_lr") else value for name, value in settings.items()}


def terms_of(model: nn.Module, options: Options, loss_fn: Callable[..., Any] | None) -> Mapping[str, str]:
    """Facts that plans depend on, as text by name (options, versions, parts of the code), for messages that say what
    differs between ranks. Code is represented by the first digits of a hash."""
    shapes = [(name, tuple(value.shape), value.dtype, value.requires_grad) for name, value in model.named_parameters()]
    return {
        "the budget": size(options.budget_bytes),
        "precision": repr(options.precision),
        "allow": ", ".join(sorted(options.allow)),
        "backend": options.backend,
        "outputs": options.outputs,
        "memopt": f"code {own_digest()[:8]}",
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the model": f"{type(model).__name__} ({_digest(shapes)})",
        "the model's code": _digest(sources_of(model, loss_fn)),
    }


def _digest(value: object) -> str:
    """The beginning of the hash of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
