"""How a step uses the inputs and results of a joint graph, which determines when their memory is freed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import fx

from memopt.price.parameter_steps import ParameterSteps
from memopt.price.priced_graph import PassedOn
from memopt.price.reductions import Reduction
from passes import FoundReuse


@dataclass(frozen=True)
class GraphUse:
    """The use of a joint graph in a step; by default alone, with all results kept to the end of the step."""

    accumulated: Collection[int] = ()
    """Positions, among all results, of the gradients that are added to an existing `.grad` as soon as they are made.
    All other results are kept to the end of the step."""
    fused: frozenset[fx.Node] = frozenset()
    """Nodes whose values never lie in memory; no schedule names them."""
    least_moved_bytes: int = 0
    """Smaller values cannot be offloaded."""
    block_bytes: int = 1
    """Memory is allocated in multiples of this."""
    steps: ParameterSteps = field(default_factory=ParameterSteps)
    """The parameters stepped within the backward: each as soon as neither it nor its gradient is read any more where
    that is possible, the others at the end, one after the other."""
    reuses: Collection[FoundReuse] = ()
    """The calls of the backward whose results take an operand's memory."""
    released: Collection[int] = ()
    """Positions of the forward's results that its caller holds to the end of the forward only."""
    passed_on: PassedOn | None = None
    """For one of several regions, the results that other code takes, and the inputs from other regions."""
    overwritten: Collection[int] = ()
    """The numbers of the inputs that are written over when the forward is done: what reads one is not recomputed."""
    reductions: Collection[Reduction] = ()
    """The groups of gradients that are reduced over the cards of a cluster, each as soon as its last one is made, and
    of which one card's share takes the place."""
    receivers: Mapping[int, int] | None = None
    """Position among the gradients → number of the input whose gradient it is; None where these are equal."""


ALONE = GraphUse()
