"""Keys for all that a plan depends on: the same key in another process means the same plan."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import passes
from memopt.account.account import account_of
from memopt.capture.author_modes import autocast_state
from memopt.capture.inputs import Call, call_signature, same_tensors, tensors_in
from memopt.device import Hardware
from memopt.planning.on_card import expandable_segments
from memopt.planning.options import Options
from memopt.planning.situation import Situation
from passes.ops.fp8_kernels import library

_OWN_SOURCES = (Path(__file__).parents[1], Path(passes.__file__).parent)


@dataclass(frozen=True)
class Job:
    """A training call, and what a plan for it is made by."""

    model: nn.Module
    call: Call
    state: Situation
    options: Options
    card: Hardware
    loss_fn: Callable[..., Any] | None
    further: object
    """What else the plan depends on, by its `repr`."""

    def key(self, graph_module: fx.GraphModule) -> str | None:
        """Of the call as Dynamo captured it.

        None for what cannot be told from something else in another process: an optimiser made by a function, sizes that
        may change.
        """
        values = [node.meta.get("example_value") for node in graph_module.graph.nodes if node.op == "placeholder"]
        if any(isinstance(value, torch.SymInt) for value in values):
            return None
        return self._hash(graph_text(graph_module), list(map(_value, values)))

    def sketch(self) -> str | None:
        """Of the call before it is captured, by the model's structure, plain attributes and source, which is what
        Dynamo most likely makes the same graph of: whoever goes by it asks for the `key` before anything runs."""
        modules = dict(self.model.named_modules())
        attributes = [(name, _attributes(module)) for name, module in modules.items()]
        kinds = {kind for module in modules.values() for kind in type(module).__mro__}
        kinds |= {type(self.loss_fn)} if isinstance(self.loss_fn, nn.Module) else set()
        function = self.loss_fn if inspect.isfunction(self.loss_fn) else None
        sources = sorted({_file_digest(source) for each in (*kinds, function) if (source := _source_file(each))})
        call = call_signature(self.call), same_tensors(self.call)
        return self._hash(attributes, sources, call, getattr(self.loss_fn, "__qualname__", None))

    def _hash(self, *parts: object) -> str | None:
        options, state, card = self.options, self.state, self.card
        optimizer = _optimizer(options.optimizer)
        text = repr((
            own_digest(),
            _torch(),
            [(name, type(module).__qualname__, module.training) for name, module in self.model.named_modules()],
            [(name, _value(each), id(each) in state.hooked) for name, each in self.model.named_parameters()],
            account_of(self.model, tensors_in(self.call), None, card),
            (state.gradients_held, state.other_forwards),
            optimizer,
            (options.budget_bytes, options.precision, sorted(options.allow), options.outputs, options.effort),
            (card, card.name != "cpu" and (expandable_segments(), library()), autocast_state(), self.further),
            parts,
        ))  # fmt: skip
        if optimizer is None or re.search(r" at 0x[0-9a-f]+>", text):
            return None
        return hashlib.sha256(text.encode()).hexdigest()


def graph_text(graph_module: fx.GraphModule) -> str:
    """Operators, arguments, shapes, types and strides of a graph and those inside of it, without comments: those say
    where in the source a node is from."""
    text = graph_module.print_readable(print_output=False, include_stride=True, include_device=True)
    return re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)


@functools.cache
def own_digest() -> str:
    """Of memopt's and the passes' own source."""
    digest = hashlib.sha256()
    for folder in _OWN_SOURCES:
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _torch() -> tuple[Any, ...]:
    """What kernels, and with them workspaces and graphs, are chosen by."""
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
        [getattr(backends.cuda, f"{kernel}_sdp_enabled")() for kernel in ("flash", "mem_efficient", "math", "cudnn")],
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's forward may ask for beside its parameters; of functions and the like only that they are there."""
    own = {name: each for name, each in vars(module).items() if not name.startswith("_")}
    return {name: (_plain(each), _inner(each)) for name, each in own.items()}


def _inner(value: Any) -> dict[str, Any]:
    """A configuration may not print all that it holds; strings have another hash in each process."""
    return {name: _plain(each) for name, each in getattr(value, "__dict__", {}).items() if "hash" not in name}


def _plain(value: Any) -> Any:
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


@functools.cache
def _source_file(kind: Any) -> Path | None:
    try:
        return None if kind is None or kind.__module__.startswith("torch.") else Path(inspect.getfile(kind))
    except (OSError, TypeError):
        return None  # built in, or typed into an interpreter


@functools.cache
def _file_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _value(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    kind = (tuple(value.shape), value.stride(), value.dtype, value.device.type)
    return (*kind, value.requires_grad, isinstance(value, nn.Parameter))


def _optimizer(optimizer: Any) -> Any | None:
    """What an optimiser's bytes depend on; None where that cannot be told."""
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


def _source(kind: type) -> str:
    """Of a class that torch's version says nothing about."""
    try:
        return "" if kind.__module__.startswith("torch.") else inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind!r} at 0x0>"  # typed into an interpreter: not to be told from others


def _group(group: Mapping[str, Any], state: Mapping[Any, Any]) -> Any:
    parameters: Sequence[torch.Tensor] = group["params"]
    held = [{name: _value(each) for name, each in state.get(one, {}).items() if name != "step"} for one in parameters]
    return _settings({name: value for name, value in group.items() if name != "params"}), held


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a learning rate the type: its value changes from step to step and says nothing about bytes."""
    return {name: type(value) if name in ("lr", "initial_lr") else value for name, value in settings.items()}
