"""A captured region as an operator graph, which passes rewrite: the stage from Dynamo's graph to the joint graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from memopt.capture.author_modes import Untraceable
from memopt.capture.blocks import mark_operators, without_mark
from memopt.capture.operator_trace import AUTHOR_AUTOCAST, trace_operators
from memopt.compat.fakes import FakeTensor
from memopt.compat.joint_trace import constants_as_attributes
from memopt.compat.operators import HigherOrderOperator
from passes import Pipeline, copy_graph_module
from passes.graphs.node_facts import OPERATOR_OVERLOAD


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
