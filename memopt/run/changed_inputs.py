"""Inputs that the caller changes in place between a forward and its backward, as `images.div_(255)` does: eager mode
need not read them again, where a plan computes from them once more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.inputs import Call, tensors_in
from memopt.capture.region import RecordedRegion
from memopt.compat.tensors import memory_of, special_kind
from memopt.planning.plan import Plan
from memopt.run.entry import Entry
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
            if _is_data(value)
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


def watch_plain(entry: Entry, call: Call, outputs: Sequence[torch.Tensor]) -> None:
    """Note which tensors of a call, whose plain forward returned these, the caller changes before their backward."""
    given = [(number, weakref.ref(one), one._version) for number, one in enumerate(tensors_in(call)) if _is_data(one)]
    node = next((one.grad_fn for one in outputs if one.grad_fn is not None), None)
    weak = weakref.ref(entry)  # the garbage collector does not see what a graph holds, which the model may keep

    def look(*_: object) -> None:
        found = [number for number, of, version in given if (one := of()) is not None and one._version != version]
        if found and (noted := weak()) is not None:
            noted.changed_inputs |= frozenset(found)

    if given and node is not None:
        node.register_prehook(look)


def mark_changed(region: RecordedRegion, inputs: Sequence[Any], call: Call, entry: Entry) -> None:
    """Have a region whose backward was not seen yet planned by what plain steps have shown."""
    if region.changed is None and entry.changed_inputs:
        changed = {id(one) for number, one in enumerate(tensors_in(call)) if number in entry.changed_inputs}
        region.changed = frozenset(number for number, value in enumerate(inputs) if id(value) in changed)


def _is_data(tensor: torch.Tensor) -> bool:
    return not (tensor.requires_grad or special_kind(tensor))


def _returned(graph_module: fx.GraphModule) -> frozenset[int]:
    """Numbers of the inputs in whose memory results lie."""
    (results,) = graph_module.graph.output_node().args
    nodes = [node for node in results if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    memory = {memory_of(node.meta.get("example_value")) for node in nodes} - {None}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return frozenset(
        number for number, node in enumerate(placeholders) if memory_of(node.meta.get("example_value")) in memory
    )
