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
    """Raised where a forward has ended since it runs more operators than were counted; it is undone. Code of the model
    that handles errors must not handle this one."""


_looked: WeakSet[nn.Module] = WeakSet()
"""The models of which it is known to which parameters their forward writes."""


@contextmanager
def ends_beyond(model: nn.Module, call: Call, most_nodes: float) -> Iterator[None]:
    """A context around a forward, which ends with `LongerPath` once it has made more than `most_nodes` autograd nodes.
    That is seen before each of its modules runs, and at the end of the block.

    A model's first forward in such a block does not end, and is looked at for parameters that it writes to; nor does
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
