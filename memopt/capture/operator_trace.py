"""Traces Dynamo's graph of a region into an operator graph, with the effects of grad mode and autocast as operators."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from memopt.capture.author_modes import AuthorModes, Untraceable, autocast_is_on
from memopt.capture.stamp import trace_blocks_once
from memopt.compat.dynamo import copy_source
from memopt.compat.fakes import FakeTensorMode, fresh_fakes
from memopt.compat.operators import (
    ENTERS_AUTOCAST,
    LEAVES_AUTOCAST,
    READS_DATA,
    SETS_GRAD_MODE,
    HigherOrderOperator,
    without_torch_functions,
)
from memopt.compat.symbols import rebind_data_sizes
from memopt.compat.tracing import before_tracing, opaque_call, pre_dispatch_graph
from passes.graphs.node_facts import graph_results
from passes.graphs.op_kinds import DATA

AUTHOR_AUTOCAST = "memopt_author_autocast"
_REGISTER_HOOK = "register_hook"
_VIEWS_IN_PLACE = {"squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}


@dataclass(frozen=True)
class _OperatorTrace:
    """The graph of a region's operators, whose inputs are not named yet."""

    module: fx.GraphModule
    forward_outputs: int


def trace_operators(
    graph_module: fx.GraphModule, inputs: Sequence[Any], written: Collection[int] = (), planned_for: str = ""
) -> fx.GraphModule:
    """Trace Dynamo's graph of a region into an operator graph, with its inputs in the same order under readable names.
    `inputs` are the values of these inputs, `written` the numbers of those that the region writes to. Autocast casts as
    on the device type `planned_for`.

    To be called in the region's tracing context, in the modes in which the region runs. Raises `Untraceable` where the
    operator graph would compute something else than the region."""
    trace = partial(_trace, inputs=inputs, planned_for=planned_for)
    return _named(trace_blocks_once(trace, graph_module, inputs, written).module, graph_module)


def _trace(graph_module: fx.GraphModule, inputs: Sequence[Any], planned_for: str) -> _OperatorTrace:
    mode, fakes = fresh_fakes(inputs)
    modes = AuthorModes(mode, planned_for)
    interpreter = _Interpreter(graph_module, mode, modes)
    with torch.set_grad_enabled(torch.is_grad_enabled()):  # restored also where the trace ends early
        try:
            traced = pre_dispatch_graph(interpreter.trace, mode, fakes)
        finally:
            while modes.authored:
                modes.leave_autocast()
    _check_gradients(graph_module, interpreter.differentiable)
    return _OperatorTrace(traced, len(interpreter.differentiable))


class _Interpreter(fx.Interpreter):
    """Interprets Dynamo's graph under a tracer. Calls that set a mode are executed and not traced."""

    def __init__(self, graph_module: fx.GraphModule, mode: FakeTensorMode, modes: AuthorModes) -> None:
        super().__init__(graph_module)
        self.mode, self.modes = mode, modes
        self.differentiable: list[bool] = []
        """For each result, whether it requires a gradient."""

    def trace(self, *inputs: Any) -> Any:
        """Run the graph on the tracer's inputs and return its results."""
        with before_tracing(self.modes.see):
            results = self.run(*inputs)
        self.differentiable = [isinstance(result, torch.Tensor) and result.requires_grad for result in results]
        return results

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, marked if in an autocast block of the author, with the data-dependent sizes of Dynamo's trace."""
        if self.modes.authored:
            # Tracers copy this entry to every node that they create for `n`.
            n.meta["custom"] = {**n.meta.get("custom", {}), AUTHOR_AUTOCAST: True}
        result = super().run_node(n)
        rebind_data_sizes(self.mode, n, result)
        return result

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method that changes a tensor's shape in place is traced as its out-of-place version, and the new value
        replaces the old one from then on, because a node has one shape."""
        inputs = self.graph.find_nodes(op="placeholder")
        if target not in _VIEWS_IN_PLACE or any(self.env.get(node) is args[0] for node in inputs):
            return super().call_method(target, args, kwargs)
        view = super().call_method(target.removesuffix("_"), args, kwargs)
        self.env.update((node, view) for node, value in self.env.items() if value is args[0])
        return view

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Set grad mode and autocast as the call says; trace any other call."""
        if isinstance(target, HigherOrderOperator):
            if target is torch.ops.higher_order.tag_activation_checkpoint:
                # The plan decides what is recomputed, so the author's checkpoint is inlined.
                inner, *rest = args
                names = {str(node.target) for node in inner.graph.find_nodes(op="placeholder")}
                own = {name: value for name, value in kwargs.items() if name in names}
                return _Interpreter(inner, self.mode, self.modes).run(*rest, *own.values())
            if autocast_is_on():
                raise Untraceable(
                    f"{target} runs under autocast, and the casts that autocast adds inside of it cannot be captured"
                )
            if not torch.is_grad_enabled():
                raise Untraceable(f"{target} runs under no_grad")
            if str(target) == _REGISTER_HOOK:
                raise Untraceable(
                    "the region calls Tensor.register_hook, and passes may change the tensor whose gradient the hook "
                    "gets"
                )
            return opaque_call(target, args, kwargs, self.mode)
        if target is SETS_GRAD_MODE:
            with without_torch_functions():
                target(*args, **kwargs)
            return None
        if target is ENTERS_AUTOCAST:
            return self.modes.enter_autocast(*args)
        if target is LEAVES_AUTOCAST:
            return self.modes.leave_autocast()
        if target is READS_DATA:  # no operator: its result would be a constant of the trace
            return DATA(*args)
        return super().call_function(target, args, kwargs)


def _check_gradients(graph_module: fx.GraphModule, differentiable: Sequence[bool]) -> None:
    """Raise `Untraceable` unless the same results require gradients as in Dynamo's graph."""
    for node, flows in zip(graph_results(graph_module.graph), differentiable, strict=True):
        known = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(known, torch.Tensor) and known.requires_grad != flows:
            raise Untraceable(f"a trace of the region would lose the gradient of its result {node}")


def _named(traced: fx.GraphModule, graph_module: fx.GraphModule) -> fx.GraphModule:
    """The traced module with its inputs named after the model's attributes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    sources = iter(graph_module.graph.find_nodes(op="placeholder"))
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            source = next(sources)
            copies[node] = graph.placeholder(readable(source.name))
            copies[node].meta = dict(node.meta)
            copy_source(source, copies[node])
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(traced, graph, "OperatorGraph")


def readable(name: str) -> str:
    """A short name for an input to which Dynamo gave this `name`: `blocks_0_norm_weight` for
    `l_run_self_modules_blocks_modules_0_modules_norm_parameters_weight_`."""
    for prefix in ("l_run_self_", "l_self_", "l_kwargs_", "l_args_", "l_"):
        name = name.removeprefix(prefix) if name.startswith(prefix) else name
    for word in ("modules_", "parameters_", "buffers_"):
        name = name.removeprefix(word).replace(f"_{word}", "_")
    name = name.strip("_")
    return name if name.isidentifier() else f"input_{name}"
