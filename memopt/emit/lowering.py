"""What every way to lower a region does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from memopt.planning.footprint import Footprint

PartitionTraced = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""What AOTAutograd calls with a joint graph, its inputs, and how many outputs are the forward's."""


@dataclass(frozen=True)
class Lowered:
    """A region that can be called with its inputs."""

    run: Callable[..., Any]
    footprint: Footprint | None = None
    """What its halves hold as lowered; None where that is what the plan says."""


class Lowering(Protocol):
    """A backend."""

    @property
    def fuses(self) -> bool:
        """Whether elementwise operators become one kernel with those that read them, without memory in between."""

    def compile(self, graph_module: fx.GraphModule, inputs: Sequence[Any], partition: PartitionTraced) -> Lowered:
        """Trace a region's joint graph, have it cut by `partition`, and make both halves callable.

        `inputs` may be fakes. A region without gradients is not cut. What `partition` raises comes through.
        """
