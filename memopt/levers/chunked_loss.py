"""The lever that computes a loss over a linear layer's logits in chunks of rows."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.capture.operators import Decision, OperatorGraph
from memopt.levers.lever import GraphChange, Lever
from memopt.units import size
from passes import ChunkLoss, EliminateDeadCode, FoundLoss, Pipeline, find_losses

LABEL = "chunked_loss"


@dataclass(frozen=True)
class _ChunkLosses:
    """Decides which losses of a region are computed in chunks of rows, without holding the logits. For the mean or sum
    of a cross entropy the forward computes the gradients too. With `weight_in_backward`, the backward computes the
    weight's gradient from recomputed logits: that is a fourth matmul, but the gradient is held only once."""

    weight_in_backward: bool = False

    def __call__(self, graph: OperatorGraph) -> Decision:
        found = find_losses(graph.module)
        chunked = [loss for loss in found if not loss.reason]
        left = tuple(f"{LABEL}: {loss.name} is left alone, since {loss.reason}" for loss in found if loss.reason)
        if not chunked or (self.weight_in_backward and not any(_trains_weight(loss, graph) for loss in chunked)):
            return Decision(Pipeline((), label=LABEL), notes=left)
        names = frozenset(loss.name for loss in chunked)
        passes = ChunkLoss(names, weight_in_backward=self.weight_in_backward), EliminateDeadCode()
        reasons = {loss.name: "in chunks" for loss in chunked}
        return Decision(Pipeline(passes, label=LABEL), reasons, (*map(self._note, chunked), *left))

    def _note(self, loss: FoundLoss) -> str:
        logits = "logits" if loss.logits_bytes is None else f"{size(loss.logits_bytes)} of logits"
        later = ", the gradient of the layer's weight only in the backward" if self.weight_in_backward else ""
        return f"{LABEL}: {loss.name} is computed without holding its {logits} whole{later}; equal but for rounding"


def _trains_weight(loss: FoundLoss, graph: OperatorGraph) -> bool:
    """Whether a loss gives a gradient to the weight of its layer."""
    inputs = graph.module.graph.find_nodes(op="placeholder")
    frozen = {node.name for number, node in enumerate(inputs) if number not in graph.parameter_inputs}
    return loss.weight not in {"", *frozen}


CHUNKED_LOSS = Lever(
    LABEL,
    "A loss over a linear layer's logits is computed in chunks of rows, so that the logits are never held whole.",
    "rounding",
    "up to one more matmul with the layer's weight",
    default=True,
    graph=GraphChange(tuple(_ChunkLosses(weight_in_backward) for weight_in_backward in (False, True))),
)
