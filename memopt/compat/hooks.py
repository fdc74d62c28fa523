"""The hooks on a tensor: those on a leaf's gradient, and those of other tensors, which can be deferred."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from passes.compat import private, replaced

PRIVATE_NAMES = private("""
    torch: Tensor._backward_hooks ._post_accumulate_grad_hooks
    torch.autograd.graph: Node._register_hook_dict
    torch._C: DisableTorchFunctionSubclass
    torch._higher_order_ops.register_hook: RegisterHookOp.__call__? [since 2.13]
""")

_Leaf = TypeVar("_Leaf", bound=torch.Tensor)
_Table = TypeVar("_Table", bound=OrderedDict[int, Any])


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a leaf has hooks on its gradient, or on its accumulated gradient."""
    return bool(with_hooks([tensor]))


def with_hooks(leaves: Iterable[_Leaf]) -> list[_Leaf]:
    """The `leaves` that have hooks; called for all parameters at every step."""
    return [
        leaf for leaf in leaves if leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None)
    ]  # fmt: skip


def hooks_left_out() -> AbstractContextManager[None]:
    """Context in which calls of `Tensor.register_hook` in a Dynamo graph do nothing, to run it without gradients."""
    try:
        from torch._higher_order_ops.register_hook import RegisterHookOp
    except ImportError:  # before torch 2.13 Dynamo writes no such calls
        return nullcontext()
    return replaced(RegisterHookOp, "__call__", lambda self, tensor, body, *values: tensor)


def backward_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that `Tensor.register_hook` added to a leaf."""
    return list((tensor._backward_hooks or {}).values())


class _DeferredHook:
    """A hook that the user has added to a tensor with a `_DeferredHooks` table; `own` is the user's function. When
    autograd calls the hook, that function is called only while the table's attribute `at_once` is true."""

    def __init__(self, own: Callable[..., Any], table: _DeferredHooks) -> None:
        self.own, self._table = own, weakref.ref(table)

    def __call__(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        table = self._table()
        return self.own(gradient) if table is not None and table.at_once else None


class _DeferredHooks(OrderedDict[int, Any]):
    """The table in which `Tensor.register_hook` puts the hooks of a tensor. While `at_once` is false, as it is at
    first, autograd's calls of these hooks do nothing: memopt (`InnerOutputs`) calls the user's functions, `own`, once
    the whole gradient of the tensor is known."""

    at_once = False

    def __init__(self, first: Callable[[torch.Tensor | None], None]) -> None:
        """`first` is called before all others, and never deferred."""
        super().__init__()
        super().__setitem__(_FIRST, first)

    def __setitem__(self, key: int, hook: Callable[..., Any]) -> None:
        super().__setitem__(key, _DeferredHook(hook, self))

    @property
    def own(self) -> list[Callable[..., Any]]:
        """The functions that the user has added as hooks."""
        return [hook.own for hook in self.values() if isinstance(hook, _DeferredHook)]


_FIRST = -1
"""A key that no hook of torch's has."""


def defer_hooks(tensor: torch.Tensor, first: Callable[[torch.Tensor | None], None]) -> _DeferredHooks:
    """Put a new table in a tensor, which is no leaf and has no hooks yet, and return it. Autograd calls `first` with
    the gradient; the caller has to call hooks that are added later. The table does not keep the tensor alive."""
    return _put_in(tensor, _DeferredHooks(first))


def hooks_to_come(tensor: torch.Tensor) -> dict[int, Any]:
    """The table in which `Tensor.register_hook` puts the hooks of a tensor that is no leaf; if the tensor has none, an
    empty one is put in it. A hook that refers to another result of the node that made the tensor is never freed, unless
    it is removed from the table."""
    table = tensor._backward_hooks
    return _put_in(tensor, OrderedDict()) if table is None else table


def _put_in(tensor: torch.Tensor, table: _Table) -> _Table:
    with torch._C.DisableTorchFunctionSubclass():
        tensor._backward_hooks = table
        node: Any = tensor.grad_fn
        node._register_hook_dict(tensor)
    return table


class WatchingHook:
    """A hook of memopt's on a leaf's accumulated gradient that only observes: a captured backward need not call it."""


def post_accumulate_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that `Tensor.register_post_accumulate_grad_hook` added to a leaf, without `WatchingHook`s of memopt."""
    return [hook for hook in _late_hooks(tensor) if not isinstance(hook, WatchingHook)]


def watching_hooks(tensor: torch.Tensor) -> list[WatchingHook]:
    """memopt's own hooks on the accumulated gradient of a leaf that only observe it."""
    return [hook for hook in _late_hooks(tensor) if isinstance(hook, WatchingHook)]


def _late_hooks(tensor: torch.Tensor) -> list[Any]:
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def hook_tables(tensor: torch.Tensor) -> list[dict[int, Callable[..., Any]]]:
    """The tables (number → hook) in which a leaf stores its hooks, without empty ones, which do nothing."""
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return [table for table in tables if table]
