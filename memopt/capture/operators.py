"""A captured region as an operator graph, which passes rewrite: the stage from Dynamo's graph to the joint graph. The
trace shows the effects of grad mode and autocast as operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from memopt.capture.blocks import mark_operators, without_mark
from memopt.capture.caller_modes import autocast_blocks, autocast_is_on
from memopt.capture.stamp import trace_blocks_once
from memopt.compat.dynamo import copy_source
from memopt.compat.fakes import FakeTensor, FakeTensorMode, failing_on_fakes, fresh_fakes
from memopt.compat.host import HOST
from memopt.compat.joint_trace import constants_as_attributes
from memopt.compat.operators import (
    ENTERS_AUTOCAST,
    LEAVES_AUTOCAST,
    READS_DATA,
    SETS_GRAD_MODE,
    HigherOrderOperator,
    RunningBy,
    autocast_kernel,
    composite_kernel,
    plain_tensors,
    schema_of,
    tree_leaves,
    tree_map,
    without_torch_functions,
)
from memopt.compat.symbols import rebind_data_sizes
from memopt.compat.tensors import is_view, storage_key
from memopt.compat.tracing import before_tracing, opaque_call, pre_dispatch_graph
from memopt.device.devices import DEVICES, device_of
from passes import Pipeline, copy_graph_module
from passes.graphs.node_facts import OPERATOR_OVERLOAD, graph_results
from passes.graphs.op_kinds import DATA


@dataclass(frozen=True)
class OperatorGraph:
    """The forward of a region in ATen operators as its author called them: `linear`, `layer_norm`,
    `scaled_dot_product_attention` and `cross_entropy_loss` are single nodes, and nothing is differentiated yet.

    The nodes are inputs (in Dynamo's order), constants, operator calls, arithmetic on sizes, and the output. Grad mode
    and autocast are written out: a value read under `no_grad` goes through `detach`, one that autocast casts through
    `to`. A higher-order operator (an `autograd.Function` with its own backward) is one opaque node with its inner
    graphs as attributes; the dtypes of its arguments must not change."""

    module: fx.GraphModule = field(repr=False)
    parameter_inputs: frozenset[int]
    """The inputs, numbered from 0, that are parameters."""
    author_typed: frozenset[str] = frozenset()
    """Names of the nodes inside `torch.autocast` blocks that the model itself opens. Their dtypes are the author's
    choice, also in blocks that disable autocast."""
    result_dtypes: tuple[torch.dtype | None, ...] | None = None
    """For each result, the dtype that it is returned in, whatever it is computed in, or None for any; None where all
    are returned in the dtypes that they have here."""


@dataclass(frozen=True)
class Decision:
    """The passes to run on a region's operator graph, with the reasons."""

    pipeline: Pipeline
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Node name in the graph that was decided on → why the passes change that node."""
    notes: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    """The user's rules that match nothing in this region; a rule that matches nothing in any region is an error."""
    exact: frozenset[str] = frozenset()
    """Names of nodes whose dtypes the user or the author chose: values that their backward reads keep full
    precision."""


Decide: TypeAlias = Callable[[OperatorGraph], Decision]
"""Returns the passes to run on a region. It is called for each capture, and must return the same for the same graph."""


DecideJoint: TypeAlias = Callable[[fx.GraphModule, int, frozenset[str]], Pipeline]
"""Returns the passes to run on a canonical joint graph, given the number of its forward's outputs and the names of
the operator graph's nodes whose types must stay (`Decision.exact`)."""


@dataclass(frozen=True)
class Rewriting:
    """The passes to run on every region of a model, and the precision that they bring about; its truth value is False
    where there are no passes."""

    deciders: tuple[Decide, ...] = ()
    """Called one after another, each with the graph that the passes before it produced."""
    joint: DecideJoint | None = None
    """Decides the passes to run on the joint graph."""
    autocast: torch.dtype | None = None
    """The autocast dtype under which regions without an operator graph run."""
    planned_for: str = ""
    """The device type whose autocast rules apply; empty: that of the tensors."""
    card: str = ""
    """The name of the card for whose kernels graphs are differentiated; empty: those of the tensors' device."""
    replaces_autocast: bool = False
    """Whether the caller's autocast is disabled inside the model, because these passes choose the dtypes."""
    needed: str = ""
    """The label of the decision that must have passes to run; empty for none. `NothingToRewrite` is raised where it has
    none."""
    reinplace: bool = False
    """Whether results of the backward overwrite operands that die there."""
    levers: tuple[str, ...] = ()
    """The names of the levers that it applies, and of the user's passes, in the order in which they are tried."""
    next_is_faster: bool = False
    """Whether one lever more promises a shorter step, so that it is tried even if this one fits the budget."""

    def __bool__(self) -> bool:
        return bool(self.deciders)


NOTHING = Rewriting()


class NothingToRewrite(Exception):
    """Raised where a rewriting finds nothing to change though it must (`Rewriting.needed`); `notes` say why."""

    def __init__(self, notes: tuple[str, ...]) -> None:
        super().__init__("; ".join(notes))
        self.notes = notes


@dataclass(frozen=True)
class Operators:
    """The rewriting of one region's operator graph, or of its joint graph (`run_joint_passes`): the graph as captured
    and after each pass, and the decisions that led to the passes."""

    stages: tuple[fx.GraphModule, ...] = ()
    """The graph as captured and after each pass; empty where the region has no operator graph."""
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    author_typed: frozenset[str] = frozenset()
    """See `OperatorGraph`."""

    @property
    def exact(self) -> frozenset[str]:
        """The names of the nodes whose dtypes the user or the author has set, from all decisions."""
        return frozenset(name for decision in self.decisions for name in decision.exact)

    @property
    def unmatched(self) -> frozenset[str]:
        """The user's precision rules that match nothing in this region."""
        return frozenset(rule for decision in self.decisions for rule in decision.unmatched)

    def spans(self) -> Iterator[tuple[tuple[str, ...], Mapping[str, str], fx.GraphModule, fx.GraphModule]]:
        """Yields for each pass, in order: its name in a tuple, the reasons for its changes by node name, and the graphs
        before and after it. The passes of a `Decision.pipeline` that has a `Pipeline.label` are yielded as one item:
        all their names, and the graphs before the first and after the last of them."""
        start = 0
        for decision in self.decisions:
            names = [inner[-1] for inner in _names(decision.pipeline)]
            steps = [names] if decision.pipeline.label and names else [[name] for name in names]
            for step in steps:
                yield tuple(step), decision.reasons, self.stages[start], self.stages[start + len(step)]
                start += len(step)

    def span(self, name: str) -> tuple[fx.GraphModule, fx.GraphModule, Mapping[str, str]] | None:
        """The graph before the first and the graph after the last of the passes that are called `name` or lie in a
        pipeline called so, and why their decisions change nodes, by the node's name; None where there is none."""
        known = [(names, decision) for decision in self.decisions for names in _names(Pipeline((decision.pipeline,)))]
        positions = [number for number, (names, _) in enumerate(known) if name in names]
        if not positions:
            return None
        reasons = {node: why for number in positions for node, why in known[number][1].reasons.items()}
        return self.stages[positions[0]], self.stages[positions[-1] + 1], reasons

    @property
    def names(self) -> tuple[str, ...]:
        """The names of passes and pipelines that `span` takes, in the order in which they ran."""
        pipeline = Pipeline(tuple(decision.pipeline for decision in self.decisions))
        return tuple(dict.fromkeys(name for names in _names(pipeline) for name in names))


def check_needed(label: str, regions: Sequence[Operators]) -> None:
    """Raise `NothingToRewrite` if no decision with this label has a pass to run in any of `regions`, with the notes of
    the first. Does nothing for the label ""."""
    labelled = [[one for one in region.decisions if one.pipeline.label == label] for region in regions]
    if label and not any(len(decision.pipeline) for decisions in labelled for decision in decisions):
        raise NothingToRewrite(tuple(note for decision in labelled[0] for note in decision.notes))


def _names(pipeline: Pipeline, outer: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """For each pass that runs, its own name preceded by the names of the nested pipelines that contain it."""
    found: list[tuple[str, ...]] = []
    for member in pipeline:
        names = (*outer, member.name)
        found += _names(member, names) if isinstance(member, Pipeline) else [names]
    return found


def operator_graph(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    parameter_inputs: frozenset[int],
    written: Collection[int] = (),
    planned_for: str = "",
) -> OperatorGraph:
    """Trace Dynamo's graph of a region into an operator graph; to be called in the region's tracing context.

    `inputs` are the values of the region's inputs, `parameter_inputs` the numbers of those that are parameters,
    `written` of those that the region writes to. Autocast casts as on the device type `planned_for`. Raises
    `Untraceable` where the operator graph would compute something else than the region."""
    _check_transforms(graph_module.graph)
    module = trace_operators(graph_module, inputs, written, planned_for)
    _check_targets(module.graph)
    _check_constants(module)
    return OperatorGraph(module, parameter_inputs, author_typed=_take_marks(module.graph))


def run_joint_passes(joint: fx.GraphModule, pipeline: Pipeline) -> Operators:
    """Run passes on a joint graph; returns the graphs before and after each one. Raises `PassError` where one fails."""
    return Operators((joint, *pipeline.stages(joint)), (Decision(pipeline),))


def to_differentiate(operators: Operators) -> fx.GraphModule:
    """A copy of the rewritten graph for AOTAutograd, with constants as plain attributes, since buffers would become
    inputs and renumber the others. Each node has its name in its metadata (`mark_operators`)."""
    module = copy_graph_module(operators.stages[-1])
    mark_operators(module.graph)
    return constants_as_attributes(module)


def _check_transforms(graph: fx.Graph) -> None:
    """Raise `Untraceable` for a region that enters a transform of torch.func: values inside of it have no meaning
    outside, where passes would edit the graph."""
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.endswith("_increment_nesting"):
            raise Untraceable(f"the region runs under torch.{name.removesuffix('_increment_nesting').lstrip('_')}")


def _check_targets(graph: fx.Graph) -> None:
    """Raise `Untraceable` for a call that is neither an operator nor arithmetic on sizes."""
    for node in graph.nodes:
        if node.op == "call_function" and not _is_operator(node):
            name = getattr(node.target, "__name__", str(node.target))
            raise Untraceable(f"the region calls {name}, which is not an operator of torch")


def _check_constants(module: fx.GraphModule) -> None:
    """Raise `Untraceable` for a tensor that a call made without an operator, which the trace holds as a constant."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, str(node.target), None), FakeTensor):
            raise Untraceable(f"the region uses a tensor that was made without an operator of torch ({node.name})")


def _is_operator(node: fx.Node) -> bool:
    """Whether a call is of an ATen or higher-order operator or of arithmetic on sizes."""
    if isinstance(node.target, (OPERATOR_OVERLOAD, HigherOrderOperator)):
        return True
    module = getattr(node.target, "__module__", "")
    return module in ("_operator", "math") or getattr(node.target, "__name__", "").startswith("sym_")


def _take_marks(graph: fx.Graph) -> frozenset[str]:
    """Names of the nodes that tracing marked as inside the author's own autocast; removes the marks."""
    marked = [node for node in graph.nodes if AUTHOR_AUTOCAST in (node.meta.get("custom") or {})]
    for node in marked:
        without_mark(node, AUTHOR_AUTOCAST)
    return frozenset(node.name for node in marked)


aten = torch.ops.aten
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
    modes = _AuthorModes(mode, planned_for)
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

    def __init__(self, graph_module: fx.GraphModule, mode: FakeTensorMode, modes: _AuthorModes) -> None:
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


class Untraceable(Exception):
    """Raised where a region cannot be traced as an operator graph without changing what it computes. Dynamo's graph is
    then used in its place, and no passes rewrite it. The message is the reason, as a clause that can follow "since"."""


class _AuthorModes:
    """Applies the grad mode and autocast of the model's code to each operator before a tracer records it, so that the
    trace shows their effects as operators.

    Under `no_grad` the operator gets detached arguments. Under autocast the dispatcher's own autocast kernel runs, and
    the tracer records its casts and its calls; a composite operator is decomposed if autocast changes what it computes.
    As with autocast's cache, all uses of a weight share one cast, which determines the dtype in which its gradients are
    summed. Operators on CPU tensors are cast by the autocast rules of the device type `planned_for`, if one is given.
    """

    def __init__(self, mode: FakeTensorMode, planned_for: str = "") -> None:
        self.mode, self.planned_for = mode, planned_for
        self.authored: list[torch.autocast] = []
        """The open autocast blocks of the model itself, outermost first."""
        self._enclosed = autocast_blocks() > 0
        self._caching = [torch.is_autocast_cache_enabled()]
        self._casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self._detached: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_kernel = False

    def enter_autocast(
        self, device: str, dtype: torch.dtype | None = None, enabled: bool = True, cache: bool | None = None
    ) -> None:
        """Open an autocast block of the model; the arguments are those of `torch.autocast`."""
        block = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
        with without_torch_functions():
            block.__enter__()  # type: ignore[no-untyped-call]
        self.authored.append(block)
        self._caching.append(self._caching[0] if cache is None else cache)

    def leave_autocast(self) -> None:
        """Close the model's innermost autocast block."""
        with without_torch_functions():
            self.authored.pop().__exit__(None, None, None)
        self._caching.pop()
        if not self.authored and not self._enclosed:
            self._casts.clear()

    def see(self, trace: Callable[..., Any], within: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle the call of the operator `func` and return its result. `trace(func, args, kwargs)` records a call in
        the graph. Autocast's kernels run under the context manager `within`, in which each operator that they call
        comes to this method again."""
        if not torch.is_grad_enabled():
            args, kwargs = self._without_gradients(trace, func, args, kwargs)
        device = _autocast_device(args, kwargs)
        if device is None:
            return self._cached_cast(trace, func, args, kwargs) if self._in_kernel else trace(func, args, kwargs)
        if device == HOST.type and self.planned_for not in ("", device):
            kernel = device_of(self.planned_for).autocast_kernel(func, torch.get_autocast_dtype(device))
            return trace(func, args, kwargs) if kernel is None else self._within(within, kernel, args, kwargs)
        kernel = autocast_kernel(func, device)
        if kernel is None:
            kernel = composite_kernel(func)
            if kernel is None or not self._autocast_changes(func, device, args, kwargs):
                return trace(func, args, kwargs)
        return self._within(within, kernel, args, kwargs)

    def _within(self, within: Any, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a kernel under the context `within` and return its result."""
        outer, self._in_kernel = self._in_kernel, True
        try:
            with within:
                return kernel(*args, **kwargs)
        finally:
            self._in_kernel = outer

    def _cached_cast(self, trace: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call made inside an autocast kernel. If it casts a weight that was cast to the same dtype before,
        return that cast from the cache instead."""
        if func is not aten.to.dtype or not self._caching[-1] or not _is_weight(args[0]):
            return trace(func, args, kwargs)
        weight, dtype = args[0], args[1]
        if (id(weight), dtype) not in self._casts:
            self._casts[id(weight), dtype] = (weight, trace(func, args, kwargs))
        return self._casts[id(weight), dtype][1]

    def _without_gradients(self, trace: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call under `no_grad`, with every tensor that requires a gradient detached. Raises
        `Untraceable` where the call writes into such a tensor."""
        if func in (aten.detach.default, DATA):
            return args, kwargs
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._check_write(func, value)

        def detach(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            if id(value) not in self._detached:
                self._detached[id(value)] = (value, trace(aten.detach.default, (value,), {}))
            return self._detached[id(value)][1]

        return tree_map(detach, args), tree_map(detach, kwargs)

    def _check_write(self, func: Any, written: Any) -> None:
        """Raise `Untraceable` where `func` would write into a tensor that requires a gradient or that shares storage
        with a detached one."""
        kept = {storage_key(value) for value, _ in self._detached.values()}
        for value in tree_leaves(written):
            if isinstance(value, torch.Tensor) and (value.requires_grad or storage_key(value) in kept):
                raise Untraceable(f"{func} writes under no_grad into a value that requires a gradient")

    def _autocast_changes(self, func: Any, device: str, args: Any, kwargs: Any) -> bool:
        """Whether autocast changes what a composite operator computes: it does if the composite makes other calls, or
        the same calls on other dtypes. A composite that fails without autocast, because only the casts give its
        operands one dtype, counts as changed."""

        def calls(*, enabled: bool) -> list[tuple[Any, ...]]:
            seen: list[tuple[Any, ...]] = []

            def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                leaves = tree_leaves((args, kwargs))
                seen.append((func, *(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))))
                return func(*args, **kwargs)

            with plain_tensors(), without_torch_functions(), self.mode, torch.no_grad(), RunningBy(run):
                given = tree_map(lambda one: one.detach() if isinstance(one, torch.Tensor) else one, (args, kwargs))
                dtype = torch.get_autocast_dtype(device)
                with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
                    func(*given[0], **given[1])
            return seen

        with_casts = calls(enabled=True)
        try:
            with failing_on_fakes():
                return with_casts != calls(enabled=False)
        except RuntimeError:
            return True


def _autocast_device(args: Any, kwargs: Any) -> str | None:
    """The type of the device whose autocast applies to a call; None where none does."""
    on = [device for device in reversed(DEVICES) if torch.is_autocast_enabled(device)]
    if not on:
        return None
    types = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    return next((device for device in on if device in types), None)


def _is_weight(value: torch.Tensor) -> bool:
    """Whether autocast's cache takes a tensor: an fp32 leaf that requires a gradient and is not a view."""
    return value.is_leaf and value.requires_grad and value.dtype == torch.float32 and not is_view(value)
