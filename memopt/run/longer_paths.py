"""Forwards that run more operators than any that was counted: values, random numbers or settings that change in each
step choose how many of a model's layers run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

from torch import nn

from memopt.capture.inputs import Call, tensors_in
from memopt.compat.autograd import next_node_number
from memopt.compat.modules import module_calls_seen, modules_compiled
from memopt.saved_values import parameters_restored
from memopt.training_state import ForwardState, contents_of, refill


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
