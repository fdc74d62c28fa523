"""Modules: what a call of a model goes through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from memopt.compat.autograd import hook_tables
from memopt.compat.subclasses import special_kind
from passes.compat import private

# `_compiled_call_impl` is what `Module.compile()` sets: an attribute of the instance (None on the class) that
# `Module.__call__` prefers to `_call_impl`. Pickling and `copy.deepcopy` leave it out.
PRIVATE_NAMES = (
    *private("torch.nn", "Module._call_impl", "Module._compiled_call_impl"),
    *private(
        "torch.nn",
        "Module._buffers",
        "Module._modules",
        "Module._parameters",
        "Module._forward_hooks",
        "Module._forward_pre_hooks",
        needed=False,
    ),
    *private("torch.utils.hooks", "BackwardHook.__init__", call="self, module, full, before"),
)

__all__ = [
    "CurrentParts",
    "Parts",
    "buffers_in",
    "compiled_call",
    "forward_hook_tables",
    "forward_hooks",
    "inside_compiled",
    "modules_of",
    "own_tp_plan",
    "parameters_in",
    "plain_call",
    "reset_compiled_call",
    "set_compiled_call",
    "without_backward_hooks",
]


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """The module's forward with its hooks, past anything that stands in for its calls."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What stands in for the module's calls: what `set_compiled_call` or `Module.compile()` set last, or None."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Have `call` stand in for the module's calls."""
    anything: Any = module
    anything._compiled_call_impl = call


def reset_compiled_call(module: nn.Module) -> None:
    """Have nothing stand in for the module's calls, and leave no trace in the module."""
    vars(module).pop("_compiled_call_impl", None)


def forward_hook_tables(modules: Iterable[nn.Module]) -> list[Mapping[int, Callable[..., Any]]]:
    """The tables in which modules keep the functions that run before and after their own forward."""
    return [table for module in modules for table in (module._forward_pre_hooks, module._forward_hooks)]


@contextmanager
def without_backward_hooks(model: nn.Module) -> Iterator[None]:
    """A block in which backward passes of this thread call no hook of the model's parameters or of any module; hooks
    of autograd nodes are called. Hooks are removed for the time, so no other thread may train this model."""
    tables = [table for parameter in model.parameters() for table in hook_tables(parameter)]
    hooks = [dict(table) for table in tables]
    thread = threading.get_ident()
    begin = BackwardHook.__init__

    def begin_without(self: BackwardHook, module: nn.Module, full: Any, before: Any) -> None:
        if threading.get_ident() == thread:
            full, before = [], []
        begin(self, module, full, before)

    for table in tables:
        table.clear()
    BackwardHook.__init__ = begin_without  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        BackwardHook.__init__ = begin  # type: ignore[method-assign]
        for table, found in zip(tables, hooks, strict=True):
            table.update(found)


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """The module that `torch.compile(module)` has wrapped in this one; None for other modules."""
    inner = module._modules.get("_orig_mod")
    return inner if type(module).__name__ == "OptimizedModule" else None


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The functions that run before and after the module's own forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and the modules in it, each once, in the same order as long as they are the same. `Module.modules`
    names them on the way, which takes several times longer: too long for every call of a small model."""
    found = {model: None}
    left = [model]
    while left:
        for module in left.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                left.append(module)
    return list(found)


def buffers_in(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The modules' own buffers, each once."""
    found = {id(value): value for module in modules for value in module._buffers.values() if value is not None}
    return list(found.values())


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The modules' own parameters, each once."""
    found = {id(value): value for module in modules for value in module._parameters.values() if value is not None}
    return list(found.values())


@dataclass(frozen=True)
class Parts:
    """The modules of a model and their own parameters, looked up once for all that a call asks of them."""

    modules: Sequence[nn.Module]
    parameters: Sequence[nn.Parameter]

    @classmethod
    def of(cls, model: nn.Module) -> Parts:
        modules = modules_of(model)
        return cls(modules, parameters_in(modules))

    @cached_property
    def parameter_ids(self) -> frozenset[int]:
        """The `id`s of the parameters."""
        return frozenset(map(id, self.parameters))

    @cached_property
    def special(self) -> dict[str, str]:
        """The parameters and buffers that are no arrays of numbers, in words, each with its kind (`special_kind`)."""
        tables = [(f"the {sort[1:]} ", vars(one)[sort + "s"]) for one in self.modules for sort in _SORTS]
        named = [(sort + name, tensor) for sort, table in tables for name, tensor in table.items()]
        return {name: kind for name, tensor in named if tensor is not None and (kind := special_kind(tensor))}


_SORTS = ("_parameter", "_buffer")


class CurrentParts:
    """The `Parts` of a model at each call. They are put together again only where a module or a parameter has come or
    gone: to see that none has takes a tenth of the time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._latest = Parts((), ())
        self._tables: list[dict[str, Any]] = []
        """The children and the parameters of the latest parts' modules."""
        self._held: list[Any] = []
        """The values of these tables in order: modules, parameters, and None for names that are not set."""

    def now(self) -> Parts:
        """The parts of the model: the same object as before, if nothing has changed."""
        held = self._now_held()
        if not held or len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._latest = Parts.of(self.model)
            modules = self._latest.modules
            self._tables = [one._modules for one in modules] + [one._parameters for one in modules]
            self._held = self._now_held()
        return self._latest

    def _now_held(self) -> list[Any]:
        """The modules' own children and parameters. Those of one that has come are seen in it once it is among them."""
        return list(chain.from_iterable([table.values() for table in self._tables if table]))


def own_tp_plan(model: nn.Module) -> Any:
    """The plan for tensor parallelism that a model of transformers brings (`_tp_plan`): patterns of paths with styles;
    None for other models."""
    return getattr(model, "_tp_plan", None)
