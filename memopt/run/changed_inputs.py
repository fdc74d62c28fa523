"""Inputs that the caller changes in place between a forward and its backward, as `images.div_(255)` does. Eager mode
need not read such an input in the backward, but a plan that recomputes from it does."""

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
    """The inputs of one run of a region, watched until its backward begins for changes that the caller makes in
    place."""

    region: RecordedRegion
    watched: dict[int, tuple[torch.Tensor, int]]
    """By the number of an input: a detached alias of it, and its `_version` in the forward."""
    plan_again: Callable[[], None]

    @classmethod
    def of(
        cls, region: RecordedRegion, inputs: Sequence[Any], model: nn.Module, plan_again: Callable[[], None]
    ) -> WatchedInputs:
        """Watch those tensors among `inputs` that are not the model's and need no gradient, without those that the
        region itself writes to or returns. `plan_again`, which drops the plans of the region, is called if one of them
        has been changed when the backward begins."""
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
        """Copies of the watched inputs, by input number: the forward runs on these, so that its backward is right even
        if the caller changes the originals. Empty where the copies do not fit into the memory that `plan` keeps for
        optimizer state that does not exist yet, or where further forwards are expected before the backward."""
        nbytes = sum(value.nbytes for value, _ in self.watched.values())
        if not nbytes or moment.to_come or nbytes > moment.left_before_state(plan):
            return {}
        return {number: value.clone() for number, (value, _) in self.watched.items()}

    def look(self) -> None:
        """To be called when the backward begins: records in the region which inputs were changed since the forward, so
        that the backwards of later plans do not read them; if any were, the region's plans are dropped."""
        changed = frozenset(number for number, (value, version) in self.watched.items() if value._version != version)
        self.watched.clear()  # the caller may free them now
        self.region.changed = changed | (self.region.changed or frozenset())
        if changed:
            self.plan_again()


def watch_plain(entry: Entry, call: Call, outputs: Sequence[torch.Tensor]) -> None:
    """Record in the model's `entry`, when the backward of `outputs` begins, which tensors of a plain call the caller
    has changed in place since its forward."""
    given = [(number, weakref.ref(one), one._version) for number, one in enumerate(tensors_in(call)) if _is_data(one)]
    node = next((one.grad_fn for one in outputs if one.grad_fn is not None), None)
    weak = weakref.ref(entry)  # the model may keep the graph, whose references the garbage collector cannot see

    def look(*_: object) -> None:
        found = [number for number, of, version in given if (one := of()) is not None and one._version != version]
        if found and (noted := weak()) is not None:
            noted.changed_inputs |= frozenset(found)

    if given and node is not None:
        node.register_prehook(look)


def mark_changed(region: RecordedRegion, inputs: Sequence[Any], call: Call, entry: Entry) -> None:
    """Set `region.changed` to the numbers of the inputs that the caller changed during plain steps, which `watch_plain`
    recorded in the model's `entry`; to be called until a backward of the region itself has shown which they are."""
    if entry.changed_inputs:
        changed = {id(one) for number, one in enumerate(tensors_in(call)) if number in entry.changed_inputs}
        region.changed = frozenset(number for number, value in enumerate(inputs) if id(value) in changed)


def _is_data(tensor: torch.Tensor) -> bool:
    return not (tensor.requires_grad or special_kind(tensor))


def _returned(graph_module: fx.GraphModule) -> frozenset[int]:
    """Numbers of the inputs that share their memory with a result of the graph."""
    (results,) = graph_module.graph.output_node().args
    nodes = [node for node in results if isinstance(node, fx.Node)]  # type: ignore[union-attr]
    memory = {memory_of(node.meta.get("example_value")) for node in nodes} - {None}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    return frozenset(
        number for number, node in enumerate(placeholders) if memory_of(node.meta.get("example_value")) in memory
    )
