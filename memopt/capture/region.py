"""A region of a training call as Dynamo recorded it, from which planning starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from memopt.capture.caller_modes import CallerModes, attention_kernels, autocast_blocks
from memopt.capture.dynamo_graph import (
    check_shards,
    inline_nested_regions,
    mark_checkpoints,
    nodes_within,
    prepare_derivatives,
    result_values,
    settle_numbers,
    takes_derivatives,
)
from memopt.capture.operators import OperatorGraph, Untraceable, operator_graph
from memopt.capture.outputs import DeferredOutputs, defer_outputs, detach_all_but_loss, example_of, feeding
from memopt.compat.dynamo import capture_settings, changes_objects, tracing_again
from memopt.compat.fakes import FakeTensor, forget_dispatches
from memopt.compat.operators import ENTERS_AUTOCAST
from memopt.compat.symbols import AssumedSizes, data_symbols_of, plain_symbol, shape_symbols
from memopt.compat.tensors import is_wrapper, special_kind
from memopt.errors import CaptureError
from passes import copy_graph_module
from passes.compat import forget_erased
from passes.graphs.node_facts import graph_results

Sizes: TypeAlias = tuple[int, ...]
"""Values of a region's changing sizes, in the order of `RecordedRegion.changing`; empty where all sizes are fixed."""


@dataclass(eq=False)
class RecordedRegion:
    """One graph of a training call's forward, with the context to trace it in outside Dynamo's callback.

    A region is recorded once and compared by identity. It owns the operator graphs that were traced from it."""

    graph_module: fx.GraphModule
    parameter_ids: Mapping[int, int]
    """Number of an input that is a trainable parameter → `id` of the model's parameter when the region was recorded."""
    frozen_ids: Mapping[int, int]
    """The same for the parameters that are not trained."""
    undifferentiated: frozenset[int]
    """Positions, among the outputs of the model's call, of those that require gradients in the plain model and are
    detached or deferred here."""
    tracing_context: Callable[[], AbstractContextManager[Any]] = field(repr=False)
    deferred: DeferredOutputs | None = None
    """The outputs that the graph does not return; None where it returns all of them."""
    plain: fx.GraphModule | None = field(default=None, repr=False)
    """The graph with all outputs, differentiable as in the plain model; None where a second run of it would exchange
    values with other ranks."""
    narrowed: torch.dtype | None = None
    """The dtype that a lever has cast the model's fp32 parameters to; None where there is none."""
    to_require_grad: frozenset[int] = frozenset()
    """Numbers of the inputs that the code calls `requires_grad_()` on, which is done before the region runs."""
    feeds: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By the position of an inner output among the outputs of the model's call: the positions of those computed from
    it."""
    changes_objects: bool = True
    """Whether its code changes Python objects that were there before: attributes, containers, global variables."""
    modes: CallerModes = field(default_factory=CallerModes.now)
    """The modes of the code around the region, in which it is traced."""
    changed: frozenset[int] | None = None
    """Numbers of the inputs that the caller was seen to change in place between a forward and its backward; None before
    the first backward."""
    _operator_graphs: dict[tuple[str, CallerModes], OperatorGraph] = field(default_factory=dict, repr=False)
    """Operator graphs, by the device type that is planned for and the modes in which they were traced (a lever may add
    autocast): at most two or three."""
    _in_modes: dict[CallerModes, RecordedRegion] = field(default_factory=dict, repr=False)
    """The regions that `as_called` has made, by their modes; they and this region share this dict."""
    failures_under_autocast: dict[torch.dtype, str] = field(default_factory=dict, repr=False)
    """The error of `for_autocast`, by the autocast dtype under which it was tried; empty where it runs."""

    @classmethod
    def record(
        cls,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        differentiate_all: bool,
        real_ids: Mapping[int, int] | None = None,
        narrowed: torch.dtype | None = None,
    ) -> RecordedRegion:
        """Record a region, in Dynamo's backend.

        Edits the graph: nested regions are inlined, numbers that Dynamo guards on become constants, and calls of
        `requires_grad_` are replaced (`prepare_derivatives`). Unless `differentiate_all`, all outputs but the loss are
        detached, and large ones are not returned but computed on demand (`defer_outputs`).

        `inputs` are the arguments that Dynamo passes to the backend; where they are fake, `real_ids` maps the `id` of a
        fake parameter to that of the model's own. `narrowed` is the dtype that a lever casts an fp32 model to, if any:
        results that the region computes in it are returned in fp32. Raises `GraphBreak` where derivatives would be
        lost, and `CaptureError` for values spread over ranks that cannot be planned (`check_shards`), and for sparse,
        nested and quantised ones."""
        _check_kinds(graph_module)
        inline_nested_regions(graph_module)
        settle_numbers(graph_module, inputs)
        mark_checkpoints(graph_module)
        to_require_grad = prepare_derivatives(graph_module)
        recorded = copy_graph_module(graph_module)
        undifferentiated = frozenset() if differentiate_all else detach_all_but_loss(graph_module)
        # A second forward would exchange values again, but other ranks run one only if they read their outputs.
        spread = check_shards(graph_module, inputs)
        deferred = None if spread or takes_derivatives(graph_module) else defer_outputs(graph_module, undifferentiated)
        feeds = feeding(recorded)
        plain = None if spread else recorded
        forget_erased(graph_module.graph)
        ids, frozen_ids = (parameter_ids(inputs, real_ids, trained=trained) for trained in (True, False))
        return cls(
            graph_module, ids, frozen_ids, undifferentiated, tracing_again(), deferred, plain, narrowed,
            to_require_grad, feeds, changes_objects(),
        )  # fmt: skip

    @property
    def parameters(self) -> frozenset[int]:
        """Numbers of the inputs that are trainable parameters."""
        return frozenset(self.parameter_ids)

    @cached_property
    def written(self) -> frozenset[int]:
        """Numbers of the inputs that the forward writes to."""
        return frozenset(number for number, value in enumerate(self.inputs) if _is_tensor(value) and value._version > 0)

    @cached_property
    def takes_derivatives(self) -> bool:
        """Whether the region's code itself takes derivatives, which its backward has to differentiate again."""
        return takes_derivatives(self.graph_module)

    @cached_property
    def differentiable(self) -> bool:
        """Whether any of the region's outputs requires a gradient."""
        values = result_values(self.graph_module)
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    @cached_property
    def has_autocast(self) -> bool:
        """Whether the region's code, or code in it under a checkpoint, opens autocast blocks of its own."""
        return any(node.target is ENTERS_AUTOCAST for node in nodes_within(self.graph_module))

    @cached_property
    def _has_attention(self) -> bool:
        return any(node.target is F.scaled_dot_product_attention for node in nodes_within(self.graph_module))

    def as_called(self) -> RecordedRegion:
        """The region with the caller's present modes in its `modes`: those that change what it computes and on which
        Dynamo has no guards. This region itself where they are the same. One is which kernels attention may use, since
        each is another operator. The other, for a region that opens autocast blocks, is whether the call is in an
        autocast block: the cast of a weight is kept until the outermost block ends, even one that switches autocast
        off, and decides in which dtype the weight's gradients are summed."""
        within = autocast_blocks() > 0 if self.has_autocast else self.modes.within
        attention = attention_kernels() if self._has_attention else self.modes.attention
        if (within, attention) == (self.modes.within, self.modes.attention):
            return self
        modes = replace(self.modes, within=within, attention=attention)
        self._in_modes[self.modes] = self
        if modes not in self._in_modes:
            self._in_modes[modes] = replace(self, modes=modes, _operator_graphs={}, failures_under_autocast={})
        return self._in_modes[modes]

    @cached_property
    def for_autocast(self) -> fx.GraphModule:
        """The region's graph with casts of its results to the dtypes that they have in the plain model. It is run
        in place of the region's own graph where a plan adds autocast: the results go to code outside of autocast,
        where most operators refuse operands of two dtypes, and losses sum in the dtype of their input."""
        copied = copy_graph_module(self.graph_module)
        output, results = copied.graph.output_node(), graph_results(copied.graph)
        dtypes = dict(zip(results, self.result_dtypes, strict=True))
        cast: dict[Any, fx.Node] = {}
        with copied.graph.inserting_before(output):
            for node, dtype in dtypes.items():
                if dtype is not None and isinstance(node, fx.Node) and node.op != "placeholder":
                    cast[node] = copied.graph.call_method("to", (node, dtype))
                    cast[node].meta.update(node.meta)
        output.args = (tuple(cast.get(node, node) for node in results),)
        copied.recompile()
        return copied

    @cached_property
    def result_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """For each result, its dtype in the plain model. None for results that are no floating-point tensors, and for
        values that are returned in place of deferred outputs: those may have any dtype."""
        examples = list(map(example_of, graph_results(self.graph_module.graph)))
        returned = len(examples if self.deferred is None else self.deferred.returned)
        return tuple(
            self.plain_dtype(example.dtype) if number < returned and example is not None else None
            for number, example in enumerate(examples)
        )

    def plain_dtype(self, traced: torch.dtype) -> torch.dtype | None:
        """The dtype in the plain model of a result that was traced in the dtype `traced`; None where `traced` is no
        floating-point dtype."""
        if not traced.is_floating_point:
            return None
        return torch.float32 if traced == self.narrowed else traced

    @cached_property
    def wrapped(self) -> frozenset[int]:
        """Numbers of the inputs that are tensors which hold other tensors, such as sharded parameters."""
        return frozenset(number for number, value in enumerate(self.inputs) if is_wrapper(value))

    @cached_property
    def operators(self) -> tuple[str, ...]:
        """The names of the operators that make the region's tensors, in order. They are equal for regions from the same
        code with inputs of different sizes, whether sizes are numbers or symbols."""
        calls = (node for node in self.graph_module.graph.nodes if node.op.startswith("call_"))
        made = (node for node in calls if _is_tensor(node.meta.get("example_value")))
        return tuple(str(getattr(node.target, "__name__", node.target)) for node in made)

    @property
    def inputs(self) -> list[Any]:
        """The fake inputs that Dynamo traced the region with."""
        return [node.meta["example_value"] for node in self.graph_module.graph.find_nodes(op="placeholder")]

    @cached_property
    def depends_on_data(self) -> bool:
        """Whether the size of a tensor in the region's graph, or a number in it, depends on data."""
        return any(data_symbols_of(node.meta.get("example_value")) for node in self.graph_module.graph.nodes)

    @cached_property
    def changing(self) -> dict[int, str]:
        """For each input that is a size which differs between calls, by input number, its symbol."""
        symbols = ((number, value) for number, value in enumerate(self.inputs) if isinstance(value, torch.SymInt))
        return {number: name for number, value in symbols if (name := plain_symbol(value)) is not None}

    @cached_property
    def counted(self) -> tuple[bool, ...]:
        """For each of the changing sizes, in order, whether memory depends on it: whether the shape of any tensor
        contains it, not only strides or the offset of a view."""
        values = (node.meta.get("example_value") for node in self.graph_module.graph.nodes)
        names = set().union(*map(shape_symbols, values))
        return tuple(name in names for name in self.changing.values())

    def sizes_of(self, inputs: Sequence[Any]) -> Sizes:
        """The values that the region's changing sizes have in `inputs`, in the order of `changing`."""
        return tuple([inputs[number] for number in self.changing])

    @cached_property
    def assumed_sizes(self) -> AssumedSizes:
        """The conditions on its changing sizes under which the region's graphs are valid."""
        inputs = self.inputs
        return AssumedSizes([inputs[number] for number in self.changing])

    def forget_dispatches(self) -> None:
        """Free the cache of operator results in the region's fake mode, once the region is traced and planned."""
        for mode in {value.fake_mode for value in self.inputs if isinstance(value, FakeTensor)}:
            forget_dispatches(mode)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """A context in which the region can be traced and compiled as inside Dynamo's callback."""
        with capture_settings(), self.tracing_context():
            yield

    def operator_graph(self, planned_for: str = "") -> OperatorGraph:
        """The region as an operator graph, cached; autocast casts as on the device type `planned_for`.

        Raises `Untraceable` where the operator graph would compute something else than the region."""
        wrapped = next((value for value in self.inputs if is_wrapper(value)), None)
        if wrapped is not None:
            raise Untraceable(
                f"the region reads weights of the tensor subclass {type(wrapped).__name__}, whose operators a trace "
                "does not record"
            )
        if self.takes_derivatives:
            raise Untraceable("the region takes derivatives itself")
        key = planned_for, CallerModes.now()
        if key not in self._operator_graphs:
            with self.tracing():
                graph = operator_graph(self.graph_module, self.inputs, self.parameters, self.written, planned_for)
            self._operator_graphs[key] = replace(graph, result_dtypes=self.result_dtypes)
        return self._operator_graphs[key]


def _check_kinds(graph_module: fx.GraphModule) -> None:
    """Raise `CaptureError` where a value of the graph is a sparse, nested or quantised tensor: it cannot be planned."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and (kind := special_kind(value)):
            line = "; made by: " + node.meta["stack_trace"].strip().splitlines()[-1].strip() if node.stack_trace else ""
            raise CaptureError(
                f"the forward has a {kind} tensor, whose operators cannot be planned, so that steps can only run "
                "as the plain model does: leave out example_inputs and give a budget in which the plain step "
                f"fits{line}"
            )


def parameter_ids(
    inputs: Sequence[Any], real_ids: Mapping[int, int] | None = None, *, trained: bool = True
) -> dict[int, int]:
    """Number → `id` of those inputs of a region that are trainable parameters, or frozen ones where `trained` is False.
    `real_ids` is as for `RecordedRegion.record`."""
    given = enumerate(inputs)
    ids = {at: id(one) for at, one in given if isinstance(one, nn.Parameter) and one.requires_grad is trained}
    return {at: (real_ids or {}).get(of, of) for at, of in ids.items()}


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or a sequence that begins with one."""
    return isinstance(value[0] if isinstance(value, (tuple, list)) and value else value, torch.Tensor)
