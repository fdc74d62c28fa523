"""A joint graph as numbers: the problem that solvers get, and the names that lead back from its ops to the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from memopt.solver import RematProblem
from memopt.solver.problem import BlockCall


@dataclass(frozen=True)
class NodePrice:
    """The cost of one evaluation of a node: seconds, and the bytes of its kernel's own temporaries."""

    seconds: float
    workspace_bytes: int
    output_bytes: int = 0
    """Bytes that its results hold as measured, where that is more than their shapes say (a loss reduced in place keeps
    the memory of its elements); else 0."""
    calls: tuple[BlockCall, ...] = ()
    """The allocator's calls within the evaluation, the results' blocks numbered as the node returns them; empty where
    they are not known (`Op.calls`)."""


@dataclass(frozen=True)
class PassedOn:
    """Of one of the regions of a call, the results that other code takes and the inputs that are outputs of others."""

    results: frozenset[int]
    """Positions, among all results of its joint graph, of outputs that are held until its backward begins at most, and
    of gradients that belong to others once it ends."""
    forward_only: Collection[int] = ()
    """Those of the outputs that nobody holds any more once the call's forward is over."""
    given: Collection[int] = ()
    """The numbers of the inputs that are outputs of earlier regions."""


@dataclass(frozen=True)
class PricedParameterStep:
    """The optimiser's step of one parameter within the backward: an op of the problem that stands for no node."""

    number: int
    """The number of the parameter among the graph's inputs."""
    after: frozenset[int]
    """The ops that read the parameter or its gradient: the step comes behind all their evaluations."""


@dataclass(frozen=True)
class PricedGraph:
    """A joint graph as a problem. `nodes[i]` names the node that op `i` evaluates; "" where it stands for none."""

    problem: RematProblem
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    """The module path of each op, "" where none is known."""
    values: tuple[str, ...] = ()
    """For each storage the node whose tensor it is, "" for one that cannot be offloaded (`Storage.movable`)."""
    steps: Mapping[int, PricedParameterStep] = field(default_factory=lambda: MappingProxyType({}))
    """The parameter steps, by the number of their op; read-only."""
    outputs: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Of one of several regions, position of an output that is held in the call's forward only → its storage."""
    given: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """Number of an input that is an output of another region → a storage of no bytes, read by the ops that read it."""
