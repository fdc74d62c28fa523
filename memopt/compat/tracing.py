"""Graphs of a region: its operators before any is decomposed or differentiated, and its joint graph cut into forward
and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import fx
from torch._prims import rng_prims
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.fx.graph import _BoxedCodeGen

from memopt.compat.fakes import FakeTensorMode
from memopt.compat.operators import plain_tensors, tree_leaves, tree_map, without_autocast, without_torch_functions
from memopt.compat.symbols import data_symbols_of
from passes.compat import forget_erased, private, replaced

# Of the last module nothing has an underscore, but what the functions return and take is not documented, and the method
# of the mode is replaced.
PRIVATE_NAMES = private("""
    torch._guards: TracingContext.get .module_context? .fake_mode? tracing
    torch.fx.experimental.proxy_tensor: get_proxy_mode track_tensor_tree ProxyTorchDispatchMode.__torch_dispatch__
    torch._functorch.partitioners: _extract_fwd_bwd_modules(joint, saved, symbols, num_fwd_outputs=)
    torch._prims.rng_prims: run_and_save_rng_state
    torch.fx.graph: _BoxedCodeGen
    torch.fx: Graph._codegen?
    torch._functorch._aot_autograd.runtime_wrappers: _FirstInvocationContext.__init__
""")


def pre_dispatch_graph(call: Callable[..., Any], mode: FakeTensorMode, inputs: Sequence[Any]) -> fx.GraphModule:
    """The graph of the operators that `call` calls on `inputs`, fakes of `mode`, before any operator is decomposed. To
    be called in a Dynamo backend."""
    outer: Any = torch._guards.TracingContext.get()
    inner: Any = torch._guards.TracingContext(mode)
    inner.module_context, inner.fake_mode = outer.module_context, mode
    with torch._guards.tracing(inner), mode, fx_traceback.preserve_node_meta():
        return make_fx(call, pre_dispatch=True)(*inputs)


@contextmanager
def before_tracing(see: Callable[..., Any]) -> Iterator[None]:
    """Context, within `pre_dispatch_graph`, in which each operator call goes to `see(trace, within, operator, args,
    kwargs)`, whose result is that of the call, instead of the tracer. `trace(operator, args, kwargs)` passes a call on
    to the tracer. `within` is the tracer's dispatch mode: operators that `see` calls under it go to `see` again."""
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
    """Calls a higher-order operator and returns its result. The call is recorded as one node; what the operator calls
    is not traced. To be called within `pre_dispatch_graph`; `mode` is the fake mode of the arguments."""
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    for number, module in enumerate(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, fx.GraphModule)):
        tracer.root.register_module(tracer.get_fresh_qualname(f"{target}_{number}_"), module)
    proxies = tree_map(tracer.unwrap_proxy, (args, kwargs))
    proxy = tracer.create_proxy("call_function", target, *proxies)
    shape_env: Any = mode.shape_env
    within = nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()
    with plain_tensors(), without_torch_functions(), mode:
        with within:  # numbers that its graphs read from tensors, such as a factor that changes from call to call
            value = target(*args, **kwargs)
        if data_symbols_of(value):
            value = target(*args, **kwargs)
    return track_tensor_tree(value, proxy, constant=None, tracer=tracer)


Call = TypeVar("Call", bound=Callable[..., Any])

# Importing it registers `torch.ops.higher_order.run_and_save_rng_state`, which emitted graphs call.
assert rng_prims.run_and_save_rng_state is not None


def extract_halves(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_objects: list[fx.Node],
    forward_outputs: int,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cuts a joint graph, whose nodes are tagged as forward or backward, into the two modules for AOTAutograd. The
    forward saves the values of `saved`, the symbolic sizes of `saved_symbols`, and `saved_objects` (device meshes, from
    torch 2.13) for the backward; `forward_outputs` is the number of outputs of the forward itself."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    objects: Any = {"saved_opaque_nodes": saved_objects} if saved_objects else {}
    return _extract_fwd_bwd_modules(joint, saved, saved_symbols, num_fwd_outputs=forward_outputs, **objects)


def first_runs_as_later_ones() -> AbstractContextManager[None]:
    """Context in which regions are compiled so that their first forward runs like all later ones. AOTAutograd otherwise
    runs it under a dispatch mode, to find custom operators that return an argument, in which some kernels compute other
    values (`memopt.compat.operators.kernels_as_in_eager_mode`)."""
    from torch._functorch._aot_autograd import runtime_wrappers

    context: Any = runtime_wrappers._FirstInvocationContext
    make = context.__init__

    def make_later_one(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._is_first = False

    return replaced(context, "__init__", make_later_one)


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Change a module's code to take a list of arguments, and return it as a function, which empties the list: each
    argument is freed after its last use."""
    forget_erased(module.graph)
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    _: str = module.code  # the modules that AOTAutograd makes are compiled when their code is first asked for
    run = module.forward

    def call(arguments: list[Any]) -> Any:
        with without_autocast():
            return run(arguments)

    return mark_boxed(call)


def called_as(graph: fx.Graph, other: fx.Graph) -> None:
    """Give a graph the calling convention of the graph `other`, such as a boxed list of arguments."""
    graph.set_codegen(other._codegen)


def mark_boxed(call: Call) -> Call:
    """Mark `call` as boxed for AOTAutograd: it takes a list of arguments and empties it."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
