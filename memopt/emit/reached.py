"""Withholds gradients that come from outputs no backward reaches.

AOTAutograd passes zeros for the gradient of such an output, and the compiled backward would return zeros, where the
plain model's parameter has no gradient at all: an optimiser decays its weight nevertheless, and DDP finds it used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from memopt.capture.joint import JointGraph
from memopt.compat.autograd import reached_outputs
from memopt.compat.tracing import mark_boxed


def is_reached(tangents: Collection[int], number: int) -> bool:
    """Whether the running backward reaches any of these outputs of the region, counted among the `number` outputs that
    have a gradient. True where autograd's graph does not tell: the region returns views of its inputs."""
    reached = reached_outputs()
    return reached is None or len(reached) != number or any(reached[tangent] for tangent in tangents)


def withholding(backward: Callable[[list[Any]], Any], joint: JointGraph) -> Callable[[list[Any]], Any]:
    """A compiled backward that returns None for the gradients that come from no output that a backward reaches."""
    partial = joint.partial_gradients
    if not partial:
        return backward

    def run(arguments: list[Any]) -> Any:
        unreached = [at for at, tangents in partial.items() if not is_reached(tangents, joint.tangents)]
        results = backward(arguments)
        return [None if at in unreached else result for at, result in enumerate(results)] if unreached else results

    return mark_boxed(run)
