"""Modules, optimizers and gradient scalers: the function that is called in place of a module's forward, the hooks and
parts of modules, and what optimizers and scalers do with fake tensors and with gradients that are not finite."""

from __future__ import annotations

import sys
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
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize
from torch.optim.optimizer import _foreach_supported_types
from torch.utils.hooks import BackwardHook

from memopt.compat.autograd import has_node
from memopt.compat.fakes import FakeTensor
from memopt.compat.hooks import hook_tables
from memopt.compat.host import HOST
from memopt.compat.tensors import special_kind
from passes.compat import Replacement, private, replaced, replaced_all

# `_compiled_call_impl` is what `Module.compile()` sets: an attribute of the instance (None on the class) that
# `Module.__call__` prefers to `_call_impl`. Pickling and `copy.deepcopy` leave it out.
PRIVATE_NAMES = private("""
    torch.nn: Module._call_impl ._compiled_call_impl ._apply(self, fn, recurse) ._buffers? ._modules? ._parameters?
        ._forward_hooks? ._forward_pre_hooks?
    torch.utils.hooks: BackwardHook.__init__(self, module, full, before)
    torch.amp: GradScaler._found_inf_per_device(self, optimizer)
    torch.optim.optimizer: _foreach_supported_types _global_optimizer_pre_hooks _global_optimizer_post_hooks
        _get_foreach_kernels_supported_devices()
    torch.compiler: _is_compiling_flag
    torch.nn.utils.parametrize: _cache
""")


def cached_parametrizations() -> dict[Any, Any]:
    """The weights that `torch.nn.utils.parametrize.cached` has computed in the context in which this is called."""
    return parametrize._cache


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """A function that runs the module's own forward with its hooks, whatever `compiled_call` returns."""
    return module._call_impl


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """The function that calls of the module run in place of its forward and hooks, set by `set_compiled_call` or
    `Module.compile()`; None without one."""
    return getattr(module, "_compiled_call_impl", None)


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make calls of the module run `call` instead of its forward and hooks."""
    module._compiled_call_impl = call


def reset_compiled_call(module: nn.Module) -> None:
    """Make calls of the module run its own forward and hooks again; no attribute is left on the module."""
    vars(module).pop("_compiled_call_impl", None)


@contextmanager
def called_plainly(module: nn.Module) -> Iterator[None]:
    """A context in which calls of the module run its own forward and hooks, whatever `compiled_call` returns."""
    call = vars(module).pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        if call is not None:
            set_compiled_call(module, call)


def modules_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` made the model or a module in it, or a module in it has a `compiled_call`; that of the
    model itself does not count."""
    return any(inside_compiled(one) or (one is not model and compiled_call(one)) for one in modules_of(model))


@contextmanager
def module_calls_seen(seen: Callable[[], None]) -> Iterator[None]:
    """A context in which `seen` is called before the forward of any module in this thread."""
    thread = threading.get_ident()
    hook = register_module_forward_pre_hook(lambda *_: seen() if threading.get_ident() == thread else None)
    try:
        yield
    finally:
        hook.remove()


def forward_hook_tables(modules: Iterable[nn.Module]) -> list[Mapping[int, Callable[..., Any]]]:
    """The dicts in which modules store their forward pre-hooks and forward hooks."""
    return [table for module in modules for table in (module._forward_pre_hooks, module._forward_hooks)]


@contextmanager
def without_backward_hooks(model: nn.Module) -> Iterator[None]:
    """A context in which backward passes of this thread call no hook of the model's parameters or of any module, but
    those of autograd nodes. No other thread may train this model meanwhile."""
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
    try:
        with replaced(BackwardHook, "__init__", begin_without):
            yield
    finally:
        for table, found in zip(tables, hooks, strict=True):
            table.update(found)


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """The module that was passed to `torch.compile` to make `module`; None for other modules."""
    inner = module._modules.get("_orig_mod")
    return inner if type(module).__name__ == "OptimizedModule" else None


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The model and the modules in it, each once, in the same order as long as the modules are the same.
    `Module.modules` also makes their names, which takes too long for every call of a small model."""
    found = {model: None}
    left = [model]
    while left:
        for module in left.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                left.append(module)
    return list(found)


def buffers_in(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The buffers that these modules have themselves (not their submodules), each once."""
    found = {id(value): value for module in modules for value in module._buffers.values() if value is not None}
    return list(found.values())


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that these modules have themselves (not their submodules), each once."""
    found = {id(value): value for module in modules for value in module._parameters.values() if value is not None}
    return list(found.values())


@dataclass(frozen=True)
class Parts:
    """The modules and the parameters of a model, collected once per call."""

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
        """The parameters and buffers that are not plain arrays of numbers, named as in "the buffer scale", each with
        its kind (`special_kind`)."""
        tables = [(f"the {sort[1:]} ", vars(one)[sort + "s"]) for one in self.modules for sort in _SORTS]
        named = [(sort + name, tensor) for sort, table in tables for name, tensor in table.items()]
        return {name: kind for name, tensor in named if tensor is not None and (kind := special_kind(tensor))}


_SORTS = ("_parameter", "_buffer")


class CurrentParts:
    """The `Parts` of a model at each call, looked up anew only after a module or a parameter was added, replaced or
    removed; to check that takes a tenth of the time. Parameters that were computed, as `torch.func.functional_call`
    puts them in place of the model's for a call, are not kept: the graph behind them may hold the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._latest = Parts((), ())
        self._tables: list[dict[str, Any]] = []
        """The dicts of submodules, then those of parameters, of the modules of the latest `Parts`."""
        self._held: list[Any] = []
        """The values of these dicts in order: modules, parameters, and None for names that are not set."""

    def now(self) -> Parts:
        """The model's modules and parameters; the same object as at the last call if none of them has changed."""
        held = self._now_held()
        if not held or len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._latest, self._tables, self._held = Parts((), ()), [], []
            found = Parts.of(self.model)
            if any(map(has_node, found.parameters)):
                return found
            self._latest, modules = found, found.modules
            self._tables = [one._modules for one in modules] + [one._parameters for one in modules]
            self._held = self._now_held()
        return self._latest

    def _now_held(self) -> list[Any]:
        """The values of `_tables` as they are now, in order. The contents of a new submodule are not among them: the
        submodule itself shows that the model has changed."""
        return list(chain.from_iterable([table.values() for table in self._tables if table]))


def moves_as_modules_do(module: nn.Module) -> bool:
    """Whether a module moves its tensors to another device by `nn.Module`'s own code; recurrent layers do not."""
    return type(module)._apply is nn.Module._apply


def apply_to_each(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a function to each parameter, gradient and buffer in place, one after the other, as `nn.Module.to` does."""
    for module in model.modules():
        module._apply(change, recurse=False)  # type: ignore[no-untyped-call]


def own_tp_plan(model: nn.Module) -> Any:
    """The plan for tensor parallelism of a model of transformers (`_tp_plan`), which maps patterns of module paths to
    parallel styles; None for other models."""
    return getattr(model, "_tp_plan", None)


def nonfinite_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The flags that `scaler.unscale_(optimizer)` set, and that `step` and `update` read: a scalar tensor for each
    device, 1 if a gradient is not finite."""
    return list(scaler._found_inf_per_device(optimizer).values())


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own kernel skips a step whose gradients are not finite, as with `fused=True`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def wrapped_by_scheduler(step: Any) -> Any | None:
    """The original function, if `step` is an optimizer's step that a scheduler has wrapped; else None."""
    return getattr(step, "__wrapped__", None) if hasattr(step, "_wrapped_by_lr_sched") else None


@contextmanager
def eager_optimizers(*, foreach: bool) -> Iterator[None]:
    """Context in which torch's optimizers make the choices of an eager run although they are given fake tensors, and
    do not notice that something is being compiled. Functions that the user has compiled run uncompiled, and the hooks
    that torch calls on steps of any optimizer are not called. With `foreach`, the foreach implementation is the default
    on the CPU too, as it is on a GPU."""
    module: Any = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it
    devices = module._get_foreach_kernels_supported_devices
    as_on_cards = (lambda: [*devices(), HOST.type]) if foreach else devices
    changes: list[Replacement] = [
        (torch.compiler, "_is_compiling_flag", False),
        (module, "_get_foreach_kernels_supported_devices", as_on_cards),
        (module, "_global_optimizer_pre_hooks", {}),
        (module, "_global_optimizer_post_hooks", {}),
    ]
    types: list[Any] = _foreach_supported_types
    types.append(FakeTensor)
    try:
        with replaced_all(changes), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        types.remove(FakeTensor)
