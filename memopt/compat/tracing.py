"""Pre-dispatch tracing: a region as operators, before any of them is decomposed or differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree

from memopt.compat.dispatch import plain_tensors, without_torch_functions
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.pytree import tree_leaves, tree_map
from passes.compat import private

# Of the last module nothing has an underscore, but what the functions return and take is not documented, and the method
# of the mode is replaced.
PRIVATE_NAMES = (
    *private("torch._guards", "TracingContext.get", "tracing"),
    *private("torch._guards", "TracingContext.module_context", "TracingContext.fake_mode", needed=False),
    *private(
        "torch.fx.experimental.proxy_tensor",
        "get_proxy_mode",
        "track_tensor_tree",
        "ProxyTorchDispatchMode.__torch_dispatch__",
    ),
)

__all__ = ["before_tracing", "opaque_call", "pre_dispatch_graph"]


def pre_dispatch_graph(call: Callable[..., Any], mode: FakeTensorMode, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph of `call` on fakes of `mode`, in operators as they were called. To be called in a Dynamo backend."""
    outer: Any = torch._guards.TracingContext.get()
    inner: Any = torch._guards.TracingContext(mode)
    inner.module_context, inner.fake_mode = outer.module_context, mode
    with torch._guards.tracing(inner), mode, fx_traceback.preserve_node_meta():
        return make_fx(call, pre_dispatch=True)(*inputs)


@contextmanager
def before_tracing(see: Callable[..., Any]) -> Iterator[None]:
    """Context in which `pre_dispatch_graph` calls `see(trace, within, operator, args, kwargs)` instead of its tracer.

    `trace(operator, args, kwargs)` calls the tracer. Operators called under the mode `within` are given to `see` too.
    """
    tracer: Any = get_proxy_mode()
    go_on = tracer.__torch_dispatch__

    def trace(func: Any, args: Any, kwargs: Any) -> Any:
        return go_on(func, (), args, kwargs)

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return see(trace, tracer, func, args, kwargs or {})

    tracer.__torch_dispatch__ = dispatch
    try:
        yield
    finally:
        del tracer.__torch_dispatch__


def opaque_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode) -> Any:
    """Calls a higher-order operator and records the call as one node, tracing nothing inside it.

    To be called within `pre_dispatch_graph`, of whose fake mode the arguments are.
    """
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    for number, module in enumerate(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, fx.GraphModule)):
        tracer.root.register_module(tracer.get_fresh_qualname(f"{target}_{number}_"), module)
    proxies = tree_map(tracer.unwrap_proxy, (args, kwargs))
    proxy = tracer.create_proxy("call_function", target, *proxies)
    with plain_tensors(), without_torch_functions(), mode:
        value = target(*args, **kwargs)
    return track_tensor_tree(value, proxy, constant=None, tracer=tracer)
