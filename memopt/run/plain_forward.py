"""Forwards that ran without a plan and whose backward has not run yet; and those that are ended, as they run more
operators than any that was counted: values, random numbers or settings that change in each step choose how many of a
model's layers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from memopt.capture.inputs import Call, tensors_in
from memopt.compat.autograd import (
    FREED,
    KEPT,
    Addition,
    Retention,
    current_backward,
    gradients_asked,
    gradients_done,
    keeps_graph,
    next_node_number,
    nodes_with,
    passes_by,
    retains_graph,
)
from memopt.compat.modules import module_calls_seen, modules_compiled
from memopt.live_objects import live_objects
from memopt.run.entry import WaitingPlain
from memopt.run.ledger import Ledger
from memopt.run.second_run import PlainSecondRun, held_with_second_run
from memopt.run.until_backward import UntilBackward
from memopt.saved_values import parameters_restored
from memopt.training_state import ForwardState, contents_of, refill

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


class LongerPath(BaseException):
    """Ends a forward that runs more operators than were counted; the forward is undone. It is no `Exception`, so that
    code of the model that handles errors does not catch it."""


_looked: WeakSet[nn.Module] = WeakSet()
"""The models of which it is known to which parameters their forward writes."""


@contextmanager
def ends_beyond(model: nn.Module, call: Call, most_nodes: float) -> Iterator[None]:
    """A context around the forward of `model` for `call`. If the forward makes more than `most_nodes` autograd nodes,
    it is undone and `LongerPath` is raised. Nodes are counted before each module runs, and at the context's end.

    A model's first forward in such a context is never ended: it shows which parameters the forward writes to. Nor is
    one that has written to a large buffer, which could not be undone."""
    if model not in _looked:
        with parameters_restored(model, restore=False):
            yield
        _looked.add(model)
        return
    before, contents = ForwardState.of(model, tensors_in(call), ()), contents_of(call)
    ended, last = False, next_node_number() + most_nodes

    def look() -> None:
        if next_node_number() > last and before.can_be_undone():
            raise LongerPath

    try:
        with nullcontext() if modules_compiled(model) else module_calls_seen(look):
            yield
        look()
    except LongerPath as longer:
        longer.with_traceback(None)  # its frames hold what the forward made
        ended = True
    if ended:
        before.undo()
        refill(contents)
        raise LongerPath
