"""Operators: their types, schemas, and kernels by dispatch key; dispatch modes; nested containers (pytrees) of
arguments; and the functions that Dynamo writes as calls in its graphs, derivatives that the code takes among them."""

from __future__ import annotations

import copy
import functools
from collections import UserDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch._C import DispatchKey, _set_grad_enabled
from torch._C._autograd import _get_data_attr  # type: ignore[attr-defined]
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

from passes.compat import overload_name as overload_name
from passes.compat import private
from passes.compat import schema_of as schema_of

PRIVATE_NAMES = private("""
    torch.utils._python_dispatch: TorchDispatchMode _disable_current_modes _get_current_dispatch_mode_stack
        TorchDispatchMode.is_infra_mode
    torch._C: DisableTorchFunctionSubclass DisableTorchFunction _DisableAutocast DispatchKey
        _dispatch_has_kernel_for_dispatch_key _dispatch_get_registrations_for_dispatch_key _ForceDispatchKeyGuard
        _dispatch_tls_local_include_set _dispatch_tls_local_exclude_set _set_grad_enabled
    torch._ops: OpOverload._op_dk? ._schema? ._overloadname? OpOverload HigherOrderOperator
    torch.utils._pytree: tree_flatten tree_leaves tree_map tree_unflatten
    torch.amp.autocast_mode: _enter_autocast _exit_autocast
    torch._C._autograd: _get_data_attr
    torch._C._functorch: get_inplace_requires_grad_allowed() set_inplace_requires_grad_allowed(allowed)
""")


def plain_tensors() -> ExitStack:
    """Context without dispatch modes and without the `__torch_function__` of tensor subclasses. Torch function modes
    still act, so that factories see the default device."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunctionSubclass())
    stack.enter_context(_disable_current_modes())
    return stack


class RunningBy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which `run(operator, args, kwargs)` runs each operator and returns its results."""

    def __init__(self, run: Callable[[Any, Any, dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})


def modes_of_the_user() -> str:
    """The names of the active dispatch modes that belong neither to torch's own tracing nor to memopt, such as
    `torch.utils.flop_counter.FlopCounterMode`; empty where there are none."""
    modes = [type(mode) for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
    return ", ".join(dict.fromkeys(kind.__name__ for kind in modes if not kind.__module__.startswith("memopt.")))


without_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Context without dispatch modes."""


def kernels_as_in_eager_mode() -> AbstractContextManager[None]:
    """Context in which a dispatch mode runs operators on real values as eager mode does: their kernels see that a
    tensor is a lazy conjugate or negative. Inside of a mode torch leaves these dispatch keys out, and a kernel that
    makes such views itself (`linalg_pinv` of complex numbers) would compute with wrong values."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(DispatchKey.Conjugate).remove(DispatchKey.Negative)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
"""Context with autocast off for all devices: a captured graph contains its casts already."""

without_torch_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Context in which torch functions ignore `__torch_function__` and torch function modes."""


def autocast_kernel(operator: Any, device: str) -> Callable[..., Any] | None:
    """The function that autocast on a device type calls in place of an operator overload: it casts and then calls the
    operator. None where autocast has no rule for it."""
    return _kernel(operator, f"Autocast{device.upper()}")


@functools.cache
def cuda_autocast_names() -> frozenset[str]:
    """The names of the ATen operators that autocast has a rule for on CUDA in the installed torch, whether or not there
    is a card: torch 2.13 lists `rms_norm`, torch 2.11 does not."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in registered)


def composite_kernel(operator: Any) -> Callable[..., Any] | None:
    """The decomposition of an operator overload into other operators; None if it has its own kernels or derivative."""
    return _kernel(operator, "CompositeImplicitAutograd")


def _kernel(operator: Any, name: str) -> Callable[..., Any] | None:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), name):
        return None
    return functools.partial(operator._op_dk, getattr(DispatchKey, name))


def makes_unknown_bytes(operator: Any) -> bool:
    """Whether an operator makes results whose size only its kernel knows: recurrent layers of oneDNN, cuDNN and MIOpen
    save a buffer for their backward, which is empty on fake tensors."""
    return schema_of(operator).name in _OF_LIBRARIES


def takes_unknown_bytes(operator: Any) -> bool:
    """Whether an operator is the backward of one that `makes_unknown_bytes`. Given a buffer of the size that fake
    tensors show, its kernel would read beyond the end."""
    return schema_of(operator).name.removesuffix("_backward") in _OF_LIBRARIES and not makes_unknown_bytes(operator)


def makes_sparse_gradients(operator: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is an embedding with `sparse=True`. Its gradient has a row for each row that was read; on
    fake tensors it is dense."""
    schema = schema_of(operator)
    if schema.name not in ("aten::embedding", "aten::_embedding_bag"):
        return False
    at = [argument.name for argument in schema.arguments].index("sparse")
    return len(args) > at and bool(args[at])


_OF_LIBRARIES = frozenset(("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"))


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested containers, in order."""
    leaves = _pytree.tree_leaves(tree)
    if not any(isinstance(leaf, UserDict) for leaf in leaves):
        return leaves
    return [one for leaf in leaves for one in (tree_leaves(leaf.data) if isinstance(leaf, UserDict) else (leaf,))]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nested containers, with `function` applied to each leaf."""

    def mapped(leaf: Any) -> Any:
        if not isinstance(leaf, UserDict):
            return function(leaf)
        same = copy.copy(leaf)
        same.data = tree_map(function, leaf.data)
        return same

    return _pytree.tree_map(mapped, tree)


SETS_GRAD_MODE: Any = _set_grad_enabled
"""The target of a node that calls `torch.set_grad_enabled`."""
ENTERS_AUTOCAST, LEAVES_AUTOCAST = _enter_autocast, _exit_autocast
"""The targets of nodes that open and close a `torch.autocast` block."""
READS_DATA: Any = _get_data_attr
"""The target of a node that reads the attribute `data` of a tensor."""
_DERIVATIVES = ("_grad_increment_nesting", "_jvp_increment_nesting")


def takes_derivative(target: Any) -> bool:
    """Whether a node's target computes derivatives by autograd, or begins a derivative of torch.func."""
    return target is torch.autograd.grad or getattr(target, "__name__", "") in _DERIVATIVES


def begins_transform(target: Any) -> bool:
    """Whether a node's target begins a transform of torch.func: a derivative in forward or reverse mode, or `vmap`."""
    return str(getattr(target, "__name__", "")).endswith("_increment_nesting")


def requiring_grad(value: torch.Tensor) -> torch.Tensor:
    """A leaf that requires a gradient and shares the memory of `value`. Works within AOTAutograd's tracing, too, where
    `requires_grad_` is forbidden."""
    before = torch._C._functorch.get_inplace_requires_grad_allowed()
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    try:
        return value.detach().requires_grad_()
    finally:
        torch._C._functorch.set_inplace_requires_grad_allowed(before)


def custom_function(
    forward: Callable[..., Any], backward: Callable[..., Any], not_differentiable: Sequence[int], *inputs: Any
) -> Any:
    """The outputs, for `inputs`, of an `autograd.Function` whose backward can be differentiated again: in the operator
    that torch itself captures for one, second derivatives would silently be zero. `forward(*inputs)` returns the
    outputs, and values for `backward`, which takes the gradients of the outputs, then these values, and returns the
    gradients of `inputs`. `not_differentiable` holds the positions of outputs without gradients."""
    apply: Any = _Function.apply
    return apply(forward, backward, frozenset(not_differentiable), *inputs)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, not_differentiable: frozenset[int], *inputs: Any) -> Any:
        outputs, saved = forward(*inputs)
        ctx.run = backward
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in saved]
        # Saved so, an output keeps its place in autograd's graph, which the second derivative goes through.
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        results = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        ctx.mark_non_differentiable(*(results[position] for position in not_differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if tensor is None else tensor for tensor, other in saved]
        return None, None, None, *ctx.run(*gradients, *values)
