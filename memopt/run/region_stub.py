"""The stub that Dynamo's compiled code calls in place of a region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from memopt.capture.region import RecordedRegion


class RunsRegions(Protocol):
    """Runs the regions of the present call."""

    def run_region(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> Any:
        """Run a region on its inputs, and return its outputs."""


class RegionStub:
    """Takes the place of a region in Dynamo's compiled code, and passes every run of it to its owner.

    Dynamo's callback ends here: nothing is traced or planned before the compiled code runs for the first time.
    """

    def __init__(self, region: RecordedRegion, owner: RunsRegions) -> None:
        self.region, self.owner = region, owner

    def __call__(self, *inputs: Any) -> Any:
        return self.owner.run_region(self.region, inputs)


def recording(
    owner: RunsRegions, *, differentiate_all: bool, narrowed: torch.dtype | None = None
) -> Callable[[fx.GraphModule, Sequence[Any]], RegionStub]:
    """A Dynamo backend that records each region and leaves a stub for it; the arguments are those of
    `RecordedRegion.record`."""

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> RegionStub:
        region = RecordedRegion.record(graph_module, inputs, differentiate_all=differentiate_all, narrowed=narrowed)
        return RegionStub(region, owner)

    return backend
