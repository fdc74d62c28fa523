"""Inputs that the caller changes in place between a forward and its backward, as `images.div_(255)` does: eager mode
need not read them again, where a plan computes from them once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.region import RecordedRegion
from memopt.compat.tensors import memory_of, special_kind
from memopt.planning.plan import Plan
from memopt.run.ledger import Moment


@dataclass(frozen=True, eq=False)
class WatchedInputs:
    """The inputs of the first run of a region, of which is to be seen whether the caller changes them."""

    region: RecordedRegion
    watched: dict[int, tuple[torch.Tensor, int]]
    """By the number of an input: what lies in its memory, and its version in the forward."""
    plan_again: Callable[[], None]

    @classmethod
    def of(
        cls, region: RecordedRegion, inputs: Sequence[Any], model: nn.Module, plan_again: Callable[[], None]
    ) -> WatchedInputs:
        """Those that come from the caller and have no gradient; `plan_again` drops the plans of the region."""
        state = set(map(id, (*model.parameters(), *model.buffers())))
        left_out = region.written | _returned(region.graph_module)
        found = {
            number: (value.detach(), value._version)
            for number, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and id(value) not in state and number not in left_out
            if not (value.requires_grad or special_kind(value))
        }
        return cls(region, found, plan_again)

    def copies(self, plan: Plan, moment: Moment) -> dict[int, torch.Tensor]:
        """Copies of the inputs, by their number, where these have room in place of the optimiser's state: a forward
        that is given them is not harmed by a change in the first step. None where they have not."""
        nbytes = sum(value.nbytes for value, _ in self.watched.values())
        if not nbytes or moment.to_come or nbytes > moment.left_before_state(plan):
            return {}
        return {number: value.clone() for number, (value, _) in self.watched.items()}

    def look(self) -> None:
        """Have the region planned as one that cannot read again what was changed; called when its backward begins."""
        changed = frozenset(number for number, (value, version) in self.watched.items() if value._version != version)
        self.watched.clear()  # the caller may free them now
        self.region.changed = changed | (self.region.changed or frozenset())
        if changed:
            self.plan_again()


def _returned(graph_module: fx.GraphModule) -> frozenset[int]:
    """Numbers of the inputs in whose memory results lie."""
    (results,) = graph_module.graph.output_node().args
    nodes = [node for node in results if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    memory = {memory_of(node.meta.get("example_value")) for node in nodes} - {None}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return frozenset(
        number for number, node in enumerate(placeholders) if memory_of(node.meta.get("example_value")) in memory
    )
