"""Calls that Dynamo by itself would not trace as their author wrote them, or would break the graph at. torch._dynamo
takes more than a second to import, so functions import it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from passes.compat import Replacement, private

PRIVATE_NAMES = private("""
    torch._dynamo.variables: TensorVariable.method_requires_grad_(self, tx, requires_grad) .method_addcdiv_?
        .method_addcmul_? .method_add_? .method_backward? GetAttrVariable.call_method(self, tx, name, args, kwargs)
    torch._dynamo.variables.ctx_manager: GradModeVariable._call_func(self, tx, values)
    torch._C: _set_grad_enabled
    torch._dynamo.variables.tensor: TensorVariable.tp_methods? [since 2.15]
    torch._dynamo.variables.torch: tracing_state_functions() TorchInGraphFunctionVariable._get_handlers()
        .call_function(self, tx, args, kwargs)
    torch._dynamo.variables.base: VariableTracker.is_tensor(self) .as_proxy(self)
        .call_method(self, tx, name, args, kwargs)
    torch._dynamo.variables.builtin: SetAttrBuiltinVariable._call_setattr [since 2.13, until 2.13]
    torch._dynamo.trace_rules: get_legacy_mod_inlinelist()
    torch._dynamo._trace_wrapped_higher_order_op: autograd_function_backward_rewritten
""")


@cache
def replacements() -> tuple[Replacement, ...]:
    """The replacements of Dynamo's own functions that are active while models are captured and run, made once, from the
    functions at the first capture. Torch 2.15 reads methods of tensors from a table that holds the functions; torch
    2.13 looks them up by name in the class."""
    import torch._dynamo.config as dynamo_config
    from torch._dynamo import _trace_wrapped_higher_order_op, trace_rules, utils
    from torch._dynamo.variables import GetAttrVariable, TensorVariable, builtin
    from torch._dynamo.variables.ctx_manager import GradModeVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    found: list[Replacement] = [
        _changed(TorchInGraphFunctionVariable, "call_function", _call_function),
        _changed(GradModeVariable, "_call_func", _written_grad_mode),
        _changed(handlers, torch.addcdiv, _kept_as_one),
        # Before torch 2.13 it is true under `torch.compile` too, and transformers then builds a causal mask that its
        # eager model does without: attention with a mask, above all with shared keys, rounds its gradients otherwise.
        (tracing_state_functions(), torch.compiler.is_exporting, False),
        _changed(trace_rules, "get_legacy_mod_inlinelist", _with_library_code),
        _changed(GetAttrVariable, "call_method", _texts_known),
        (_trace_wrapped_higher_order_op, "autograd_function_backward_rewritten", _with_contiguous_gradients),
    ]
    setter: Any = getattr(builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable)
    for owner, name, change in (
        (setter, "_call_setattr" if hasattr(setter, "_call_setattr") else "call_setattr", _set_by_a_method),
        (utils, "_get_dynamo_config_for_logging", _where_it_can_be_written),
    ):
        if hasattr(owner, name):
            found.append(_changed(owner, name, change))
    methods: Any = TensorVariable
    table: dict[str, Any] = getattr(methods, "tp_methods", {})
    changes = dict.fromkeys(("add_", "addcdiv_", "addcmul_"), _kept_as_one) | {"requires_grad_": _requires_grad_}
    if hasattr(dynamo_config, "trace_autograd_ops"):
        changes["backward"] = _left_out
    for name, change in changes.items():
        changed = change(getattr(methods, f"method_{name}"))
        found.append((methods, f"method_{name}", changed))
        if name in table:
            found.append((table, name, type(table[name])(changed)))
    return tuple(found)


def _changed(owner: Any, name: Any, change: Callable[[Any], Any]) -> Replacement:
    """The replacement of an attribute of an object, or of a value in a dict, by what `change` makes of it."""
    return owner, name, change(owner[name] if isinstance(owner, dict) else getattr(owner, name))


@cache
def _with_library_code(own: Callable[[], set[str]]) -> Callable[[], set[str]]:
    """Traces torch's transformer modules also where the graph breaks within one of them, as where an encoder branches
    on the values of its mask, and `checkpoint_sequential`. By itself Dynamo does not trace code of torch.nn beyond a
    break: all layers behind it would run in eager mode, in no graph."""
    from torch.utils import checkpoint

    files = {torch.nn.modules.transformer.__file__, checkpoint.__file__}
    return cache(lambda: own() | files)


@cache
def _texts_known(own: Callable[..., Any]) -> Callable[..., Any]:
    """Traces methods of a text that a class or a function of torch has, as in `type(weight).__module__.startswith(…)`.
    Dynamo by itself breaks the graph there for classes such as `torch.nn.Parameter` once torchao is imported."""
    from torch._dynamo.variables import ConstantVariable

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        text = self.as_python_constant() if self.is_python_constant() else None
        owner = ConstantVariable.create(text) if isinstance(text, str) else None
        return own(self, tx, name, args, kwargs) if owner is None else owner.call_method(tx, name, args, kwargs)

    return call_method


@cache
def _kept_as_one(own: Callable[..., Any]) -> Callable[..., Any]:
    """Traces `addcdiv`, `addcdiv_` and `addcmul_` with a number as `value`, and `add_` with a number as `alpha`, as one
    operator. Dynamo by itself traces several, which round in another way; for `add_` in torch 2.11 only."""
    from torch._dynamo.variables import TensorVariable

    def traced(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        is_tensor = any(isinstance(kwargs.get(name), TensorVariable) for name in ("value", "alpha"))
        return own(self, tx, *args, **kwargs) if is_tensor else None

    return traced


_keeps_requires_grad: ContextVar[bool] = ContextVar("keeps_requires_grad", default=False)


@contextmanager
def keeping_requires_grad() -> Iterator[None]:
    """Context, within `capture_settings`, in which Dynamo writes `value.requires_grad_()` of an intermediate value, or
    of a tensor that is passed to the compiled call, into the graph as a node that nothing reads, and continues with a
    value that requires a gradient.

    Dynamo by itself breaks the graph there, since an input would change, and AOTAutograd would lose the gradient of an
    intermediate value that the region returns. The caller has to replace the node, make the input require a gradient
    before the region runs, and refuse a region that returns such an intermediate value."""
    token = _keeps_requires_grad.set(True)
    try:
        yield
    finally:
        _keeps_requires_grad.reset(token)


@cache
def _requires_grad_(own: Callable[..., Any]) -> Callable[..., Any]:
    """Traces `requires_grad_()` as a node of the graph while `keeping_requires_grad` is active, else as Dynamo does."""

    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        value = self.as_proxy().node.meta["example_value"]
        wanted = requires_grad if requires_grad is True else requires_grad.as_python_constant()
        traced = _keeps_requires_grad.get() and wanted and not value.requires_grad
        if not traced or (self.source and not _is_given(self.as_proxy().node, tx)):
            return own(self, tx, requires_grad)
        tx.output.create_proxy("call_method", "requires_grad_", (self.as_proxy(),), {})
        value.requires_grad_()
        self.requires_grad = True
        return self

    return method_requires_grad_


@cache
def _set_by_a_method(own: Callable[..., Any]) -> Callable[..., Any]:
    """Traces `value.requires_grad = …` as `value.requires_grad_(…)`, where Dynamo by itself always breaks the graph."""

    def set_attribute(self: Any, tx: Any, owner: Any, name: Any, value: Any) -> Any:
        if not owner.is_tensor() or name.as_python_constant() != "requires_grad":
            return own(self, tx, owner, name, value)
        owner.call_method(tx, "requires_grad_", [value], {})
        return value

    return set_attribute


def _is_given(node: Any, tx: Any) -> bool:
    """Whether a node is an input of the region whose graph Dynamo writes now, and no parameter."""
    is_input = node.op == "placeholder" and node.graph is tx.output.graph
    return is_input and not isinstance(node.meta["example_value"], torch.nn.Parameter)


@cache
def _call_function(own: Callable[..., Any]) -> Callable[..., Any]:
    """Traces `op(…, out=part)` as `part.copy_(op(…))`, which writes the same numbers, where `part` is a tensor that is
    not contiguous, unless eager mode would resize or refuse it (another shape or dtype, or gradients). Traces
    `zeros(…, requires_grad=True)` as `zeros(…).requires_grad_()` while `keeping_requires_grad` is active."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.autograd.grad and 3 < len(args) <= 5:  # Dynamo looks for these by name
            args, kwargs = args[:3], {**kwargs, **dict(zip(("retain_graph", "create_graph"), args[3:], strict=False))}
        wanted = kwargs.get("requires_grad") if _keeps_requires_grad.get() else None
        if wanted is not None and wanted.is_python_constant() and wanted.as_python_constant() is True:
            made = own(self, tx, args, {name: value for name, value in kwargs.items() if name != "requires_grad"})
            return made.call_method(tx, "requires_grad_", [], {})
        part = kwargs.get("out")
        if part is None or not part.is_tensor() or _value(part).is_contiguous():
            return own(self, tx, args, kwargs)
        result = own(self, tx, args, {name: value for name, value in kwargs.items() if name != "out"})
        if not _fits(result, part):
            return own(self, tx, args, kwargs)
        return part.call_method(tx, "copy_", [result], {})

    return call_function


@cache
def _written_grad_mode(own: Callable[..., Any]) -> Callable[..., Any]:
    """Writes every change of the grad mode within an `autograd.Function` into the graph, also one to the mode that is
    on already. A backward is traced without gradients, so that `no_grad` in it would otherwise leave no trace."""

    def _call_func(self: Any, tx: Any, values: Any) -> None:
        within = getattr(tx.output.current_tracer, "source_target", None)
        if str(within) == "autograd.Function" and torch.is_grad_enabled() == values[0]:
            tx.output.create_node("call_function", torch._C._set_grad_enabled, (values[0],), {})
        else:
            own(self, tx, values)

    return _call_func


@cache
def _left_out(own: Callable[..., Any]) -> Callable[..., Any]:
    """Breaks the graph at `backward()` within a forward, which writes to `.grad`, also if derivatives are traced."""
    import torch._dynamo.config as dynamo_config

    def method_backward(*args: Any, **kwargs: Any) -> Any:
        with dynamo_config.patch(trace_autograd_ops=False):
            return own(*args, **kwargs)

    return method_backward


def _fits(result: Any, part: Any) -> bool:
    """Whether `part.copy_(result)` writes what `out=part` would: same shape, dtype and device, and no gradient."""
    if not result.is_tensor():
        return False
    made, into = _value(result), _value(part)
    if made.dtype != into.dtype or made.device != into.device or made.shape != into.shape:
        return False
    return not (torch.is_grad_enabled() and (made.requires_grad or into.requires_grad))


def _value(tensor: Any) -> torch.Tensor:
    """The fake tensor behind one of Dynamo's variables."""
    return tensor.as_proxy().node.meta["example_value"]


@cache
def _where_it_can_be_written(own: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps the function by which Dynamo writes its settings as JSON into its record of a compilation, to return None
    where JSON cannot hold them: torch 2.11 prints a traceback for each compilation if a setting is a function."""

    def settings() -> Any:
        try:
            return own()
        except TypeError:
            return None

    return settings


def _with_contiguous_gradients(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The `backward` of an `autograd.Function` as Dynamo is to trace it: its incoming gradients are made contiguous.
    The function of torch's that this replaces fails where an output gets no gradient (None)."""

    def contiguous(context: Any, *gradients: Any) -> Any:
        return backward(context, *[None if gradient is None else gradient.contiguous() for gradient in gradients])

    return contiguous
