"""A captured region as an operator graph, which passes rewrite: it stands between Dynamo's graph and the joint one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from memopt.capture.author_modes import Untraceable, autocast_is_on
from memopt.capture.operator_trace import AUTHOR_AUTOCAST, trace_operators
from memopt.compat.graph_calls import enters_autocast
from memopt.compat.operators import HigherOrderOperator
from passes import Pass, Pipeline, copy_graph_module
from passes.graphs.node_facts import OPERATOR_OVERLOAD


@dataclass(frozen=True)
class OperatorGraph:
    """The forward of a region in ATen operators as its author called them: `linear`, `layer_norm`,
    `scaled_dot_product_attention`, `cross_entropy_loss` are whole, and nothing is differentiated yet.

    Nodes are inputs (in Dynamo's order), constants, calls of operators, arithmetic on sizes, and the output. Grad mode
    and autocast are written out: a value that `no_grad` reads comes by `detach`, one that autocast casts by `to`.
    Higher-order operators (an `autograd.Function` with its own backward) are one opaque node each, with inner graphs as
    attributes: what it is given must keep its type.
    """

    module: fx.GraphModule = field(repr=False)
    parameter_inputs: frozenset[int]
    """Which of the inputs, counted from 0, are parameters."""
    notes: tuple[str, ...] = ()
    author_typed: frozenset[str] = frozenset()
    """Names of the nodes inside of `torch.autocast` blocks that the model itself opens: their types are its author's
    choice, also where he turns autocast off."""


@dataclass(frozen=True)
class Decision:
    """What is to be done to a region's operator graph, and why."""

    pipeline: Pipeline
    reasons: Mapping[str, str] = field(default_factory=dict)
    """By name of a node in the graph that was decided on."""
    notes: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    """The user's rules that say nothing of this region; one that says nothing of any is refused."""
    exact: frozenset[str] = frozenset()
    """Nodes whose types are somebody's wish: what the backward reads of them keeps all of its bits."""


Decide: TypeAlias = Callable[[OperatorGraph], Decision]
"""Which passes are to run on a region. Called anew for each capture of it: the same graph must get the same passes."""


DecideJoint: TypeAlias = Callable[[fx.GraphModule, int], Pipeline]
"""Which passes are to run on a canonical joint graph with so many outputs of its forward."""


@dataclass(frozen=True)
class Rewriting:
    """What is to be done to every region of a model; false where there is nothing to do."""

    deciders: tuple[Decide, ...] = ()
    """Asked one after another, each on the graph that the one before has left."""
    joint: DecideJoint | None = None
    """Which passes run on the joint graph."""
    autocast: torch.dtype | None = None
    """Regions that have no operator graph run under autocast with this dtype."""
    planned_for: str = ""
    """The type of device whose autocast counts, if not that of the tensors."""
    replaces_autocast: bool = False
    """Whether autocast that the caller has switched on is off in the model: its types are decided here."""
    needed: str = ""
    """The label of a decision that has to find something to do, if any: else all this is for nothing."""
    reinplace: bool = False
    """Whether results of the backward are written over operands that die there."""

    def __bool__(self) -> bool:
        return bool(self.deciders)


NOTHING = Rewriting()


class NothingToRewrite(Exception):
    """The decision that was needed finds nothing to do in a region; `notes` say what it looked at."""

    def __init__(self, notes: tuple[str, ...]) -> None:
        super().__init__("; ".join(notes))
        self.notes = notes


_EXACT = "memopt_exact"


@dataclass(frozen=True)
class Operators:
    """What became of one region on its operator graph."""

    stages: tuple[fx.GraphModule, ...] = ()
    """As captured, and after each pass; empty where the region stayed at Dynamo's level."""
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    author_typed: frozenset[str] = frozenset()
    """See `OperatorGraph`."""

    @property
    def pipeline(self) -> Pipeline:
        """All passes that ran."""
        return Pipeline(tuple(decision.pipeline for decision in self.decisions))

    @property
    def unmatched(self) -> frozenset[str]:
        """The user's rules that say nothing of this region."""
        return frozenset(rule for decision in self.decisions for rule in decision.unmatched)

    def check_needed(self, label: str) -> None:
        """Raise `NothingToRewrite` if no decision of that label runs any pass."""
        labelled = [decision for decision in self.decisions if decision.pipeline.label == label]
        if label and not any(len(decision.pipeline) for decision in labelled):
            raise NothingToRewrite(tuple(note for decision in labelled for note in decision.notes))

    def reasons(self, name: str) -> Mapping[str, str]:
        """Why passes do what they do, by node, for what `span` knows under that name."""
        named = [
            decision
            for decision in self.decisions
            if any(name in names for names in _names(Pipeline((decision.pipeline,))))
        ]
        return {node: reason for decision in named for node, reason in decision.reasons.items()}

    def span(self, name: str) -> tuple[fx.GraphModule, fx.GraphModule] | None:
        """The graph before and after the passes, or the nested pipeline, of that name; None where there is none."""
        positions = [number for number, names in enumerate(_names(self.pipeline)) if name in names]
        return (self.stages[positions[0]], self.stages[positions[-1] + 1]) if positions else None

    @property
    def names(self) -> tuple[str, ...]:
        """What `span` knows, in the order of the passes."""
        return tuple(dict.fromkeys(name for names in _names(self.pipeline) for name in names))


def _names(pipeline: Pipeline, outer: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """For each pass that runs its name, and those of the pipelines that it is in but for the outermost."""
    found: list[tuple[str, ...]] = []
    for each in pipeline:
        names = (*outer, each.name)
        found += _names(each, names) if isinstance(each, Pipeline) else [names]
    return found


def operator_graph(
    graph_module: fx.GraphModule, inputs: Sequence[Any], parameter_inputs: frozenset[int], planned_for: str = ""
) -> OperatorGraph:
    """Trace the graph that Dynamo recorded of a region into operators, in the region's tracing context.

    Autocast casts as on the type of device that is planned for. Raises `Untraceable` where its meaning would be lost.
    """
    module = trace_operators(graph_module, inputs, planned_for)
    _check_targets(module.graph)
    return OperatorGraph(module, parameter_inputs, author_typed=_take_marks(module.graph))


def needs_operators(graph_module: fx.GraphModule) -> bool:
    """Whether autocast is at work in a region: its casts are then written out, since AOTAutograd would cast a weight
    for each use, and sum its gradients in another type than the plain model does."""
    return autocast_is_on() or any(enters_autocast(node.target) for node in graph_module.graph.nodes)


def rewrite(graph: OperatorGraph, deciders: Sequence[Decide], needed: str = "") -> Operators:
    """Run the passes that are decided for a graph.

    Raises `PassError`, and `NothingToRewrite`, before later ones run, where the decision of the label that is `needed`
    has none.
    """
    stages, decisions = [graph.module], []

    def keep(_: Pass, before: fx.GraphModule, after: fx.GraphModule) -> None:
        stages.append(after)

    for decide in deciders:
        decisions.append(decide(replace(graph, module=stages[-1])))
        if needed and decisions[-1].pipeline.label == needed:
            Operators(decisions=tuple(decisions)).check_needed(needed)
        Pipeline((decisions[-1].pipeline,), observer=keep)(stages[-1])
    notes = (note for decision in decisions for note in decision.notes)
    return Operators(tuple(stages), tuple(decisions), (*graph.notes, *notes), graph.author_typed)


def to_differentiate(operators: Operators) -> fx.GraphModule:
    """The rewritten graph as AOTAutograd is to trace it, constants as plain attributes: it would take buffers for
    inputs, and number all the others anew. What is made of nodes that are `exact` says so (`is_exact`)."""
    module = copy_graph_module(operators.stages[-1])
    exact = frozenset(name for decision in operators.decisions for name in decision.exact)
    for node in module.graph.nodes:
        if node.name in exact:
            # Tracers copy this entry to all that they make of a node, its backward included.
            node.meta["custom"] = {**node.meta.get("custom", {}), _EXACT: True}
    for name, constant in list(module._buffers.items()):
        del module._buffers[name]
        setattr(module, name, constant)
    return module


def is_exact(node: fx.Node) -> bool:
    """Whether a node of a joint graph comes from one whose types are somebody's wish."""
    return _EXACT in node.meta.get("custom", {})


def _check_targets(graph: fx.Graph) -> None:
    """Raise `Untraceable` for a call that is neither an operator nor arithmetic on sizes."""
    for node in graph.nodes:
        if node.op == "call_function" and not _is_operator(node):
            name = getattr(node.target, "__name__", str(node.target))
            raise Untraceable(f"it calls {name}, which is no operator")


def _is_operator(node: fx.Node) -> bool:
    if isinstance(node.target, (OPERATOR_OVERLOAD, HigherOrderOperator)):
        return True
    module = getattr(node.target, "__module__", "")
    return module in ("_operator", "math") or getattr(node.target, "__name__", "").startswith("sym_")


def _take_marks(graph: fx.Graph) -> frozenset[str]:
    """Names of the nodes that tracing marked as inside of the author's own autocast; removes the marks."""
    marked: set[str] = set()
    for node in graph.nodes:
        custom = node.meta.get("custom")
        if custom and AUTHOR_AUTOCAST in custom:
            marked.add(node.name)
            rest = {name: value for name, value in custom.items() if name != AUTHOR_AUTOCAST}
            node.meta.update(custom=rest) if rest else node.meta.pop("custom")
    return frozenset(marked)
