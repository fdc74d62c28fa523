"""Forwards that ran without a plan and whose backward has not run yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memopt.compat.autograd import (
    FREED,
    KEPT,
    Addition,
    Retention,
    current_backward,
    gradients_asked,
    gradients_done,
    keeps_graph,
    nodes_with,
    passes_by,
    retains_graph,
)
from memopt.live_objects import live_objects
from memopt.run.entry import WaitingPlain
from memopt.run.ledger import Ledger
from memopt.run.second_run import PlainSecondRun, held_with_second_run
from memopt.run.until_backward import UntilBackward

WAITS = "memopt waits"
"""The key in the metadata of the autograd nodes of a plain forward's outputs that leads to a list with the forward."""


@dataclass(eq=False)
class PlainForward(WaitingPlain):
    """A forward that ran without a plan and waits for its backward; its autograd graph keeps this object alive."""

    check_graph: Callable[[PlainForward, Retention, bool], None]
    """Called with this forward, how its backwards keep its graph (the one that begins now included), and whether the
    last backward begins, which frees the graph. Raises `BudgetError` where the budget has no room for that."""
    check_appeared: Callable[[PlainForward, int], None]
    """Called with this forward, when a further backward through it begins, and the number of those that have begun.
    Raises `BudgetError` where the budget has no room for what appeared since the forward."""
    second_run: PlainSecondRun | None = None
    """The means to compute its saved values a second time; None where that is not possible."""
    graph: Retention = FREED
    """How its backwards so far have kept its graph."""
    _backwards: set[int] = field(default_factory=set)
    """The numbers of the backwards through it that have begun."""
    _derives: bool = False
    """Whether a backward is running whose gradients have a graph of their own."""
    _freed_bytes: int = 0
    """The bytes that a second run will save again."""

    def __post_init__(self) -> None:
        gradients_asked(self)

    def free_saved(self) -> int:
        """Free what the forward has saved, and make its backward run the forward a second time. Returns the bytes
        freed; 0 where it cannot be run again."""
        if (second_run := self.second_run) is None:
            return 0
        self.second_run, kept = None, {one.address for one in self.outputs}
        nodes = nodes_with(WAITS, self, live_objects(torch.Tensor))
        freed = second_run.free(nodes, self.entry.device, kept)
        if freed:
            self.held_bytes, again = held_with_second_run(self.held_bytes - freed, self.outputs)
            self.room_bytes -= again
            self._freed_bytes = freed
        return freed

    def saved_bytes(self) -> int:
        """The bytes that the forward would hold until its backward if `free_saved` had freed nothing."""
        return self.held_bytes + self._freed_bytes

    def end(self) -> None:
        """Called when a backward through any of the forward's outputs begins: the forward waits no longer, unless that
        backward keeps its graph. Before the model's first step, raises `BudgetError` where the budget has no room for
        the kept graph; or, if other backwards through it came before, for what has appeared since the forward."""
        UntilBackward.backward_begins(self.entry, alone=not self.overlaps)
        self._backwards.add(current_backward())
        if len(self._backwards) > max(1, self.entry.seen_until_backward):
            self.check_appeared(self, len(self._backwards))
        if retains_graph():
            self.graph |= KEPT
            self.check_graph(self, self.graph, False)
        elif not keeps_graph():
            self.entry.plain.discard(self)
            gradients_done(self)
        Ledger.of(self.entry).backward_begins(self)

    def before_backward(
        self, starts: Sequence[Any], inputs: Sequence[Any], order: int, *, frees: bool
    ) -> Mapping[int, Addition]:
        """Called before each backward of the process. It starts from `starts`, tensors or edges, and computes the
        gradients of `inputs` (empty: of all leaves). `order` is 0 without `create_graph=True`, else 1 more than the
        highest order of the gradients from which `starts` were computed. `frees`: it frees its graph.

        Before the model's first step, raises `BudgetError` where the backward goes through this forward, has
        `create_graph=True` or comes after one that had, and exceeds the budget. Returns an empty mapping: nothing is
        added to gradients."""
        if (order or self.graph.derived) and passes_by(starts, WAITS, self):
            if order:
                self.entry.differentiated = True
                own = frozenset(map(id, self.entry.model.parameters()))
                self.second_run = None  # the gradients' graph reads the saved values
                self.graph = self.graph.further(order, own.intersection(map(id, inputs)) if inputs else own)
            self.check_graph(self, self.graph, not order)
            self.freed = frees
            self._derives = order > 0
        return {}

    def after_backward(self, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Called after a backward with `create_graph=True`: the graph of its gradients keeps this object alive from now
        on. `gradients` are those that it returned; None where it has added them to `.grad`."""
        if self._derives:
            self._derives = False
            found = [one.grad for one in self.entry.model.parameters()] if gradients is None else gradients
            nodes: set[Any] = {one.grad_fn for one in found if one is not None and one.grad_fn is not None}
            for node in nodes:
                node.metadata[WAITS] = [*node.metadata.get(WAITS, ()), self]
