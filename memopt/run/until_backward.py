"""The bytes that the caller's own code, such as a loss outside of the model, holds between a forward and its backward:
estimated from the autograd graph of the backward, or read from a meter if one runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from typing import Any, ClassVar

import torch

from memopt.account.account import distinct_bytes
from memopt.compat.autograd import backward_starts, graph_until, received_bytes
from memopt.compat.operators import without_modes
from memopt.compat.saved_tensors import saved_by
from memopt.compat.tensors import bytes_by_address, bytes_still_there, weak_storages
from memopt.device.devices import device_of
from memopt.errors import BudgetError
from memopt.meter import PeakMeter
from memopt.run.entry import Entry
from memopt.run.ledger import Ledger
from memopt.units import size

LOSS_OUTSIDE = 1
"""A loss outside of the model is guessed to need this many times the bytes of the outputs' gradients, in addition to
these: as cross entropy needs if nobody keeps the outputs."""
LARGE_LOSS_OUTSIDE = 5
"""As `LOSS_OUTSIDE`, as far as the budget allows, and in the budget that a refusal names: for a few losses together."""
_STAYING = 2
"""This part (one half) of what is guessed beyond `LOSS_OUTSIDE` is assumed to stay until the end of the backward:
one-hot targets and probabilities that the caller keeps."""
_MARKS = count(12_343, 2)
"""Sizes in bytes of blocks that are allocated and freed at once, each to mark one moment among the meter's events."""
_RETURNED = "memopt returned"
"""The key in the metadata of the autograd nodes of a forward's outputs under which its `UntilBackward` is stored."""


class UntilBackward:
    """Observes what the caller's own code holds from the return of a forward to the beginning of its backward.

    Tensors that operators saved are in the autograd graph. Those that operators allocate and free are not: their bytes
    are estimated from the sizes of the gradients that the backward will pass between operators (`held_bytes`), unless
    the CPU's meter (`memopt.measure_peak`) runs and measures them. memopt runs no meter of its own, as torch allows one
    profiler at a time, which may be the user's."""

    _running: ClassVar[UntilBackward | None] = None

    def __init__(
        self, entry: Entry, outputs: Sequence[torch.Tensor], given: Iterable[torch.Tensor], tangent_bytes: int
    ) -> None:
        self.entry: Callable[[], Entry | None] = weakref.ref(entry)
        self._seen = entry.callers_code
        self.ended = self._marked = False
        self._begin_mark, self._end_mark = next(_MARKS), next(_MARKS)
        self._loss_is_outside = any(map(torch.Tensor.dim, outputs))
        self._returned_bytes = distinct_bytes(outputs)
        self._begins_with = max(self._returned_bytes, tangent_bytes)
        self._outputs, self._given = tuple(weak_storages(outputs)), tuple(weak_storages(given))
        for output in outputs:
            node: Any = output.grad_fn
            node.metadata[_RETURNED] = weakref.ref(self)
            node.register_prehook(partial(_end, weakref.ref(self)))

    @classmethod
    def begin(
        cls, entry: Entry, outputs: Sequence[torch.Tensor], given: Iterable[torch.Tensor], tangent_bytes: int
    ) -> None:
        """Begin to observe, as a forward returns `outputs`, which require gradients; unless all of them are single
        numbers, the loss is outside of the model. `entry` is the model's, in which the bytes found are recorded.
        `given` are the tensors of the call; like outputs and parameters, they do not count as held by the caller's
        code. `tangent_bytes` is the size of the gradients with which the backward begins by the plan; 0 without one."""
        cls.drop()
        cls._running = seen = cls(entry, outputs, given, tangent_bytes)
        backward_starts(cls.look)
        if seen._loss_is_outside and PeakMeter.running() is not None and device_of(entry.device).is_host:
            PeakMeter.listeners.append(seen.read)
            _mark(seen._begin_mark)

    @classmethod
    def backward_begins(cls, entry: Entry, *, alone: bool) -> None:
        """Record that the backward of the observed forward begins, if it is one of the model of `entry`. `alone`: no
        other model ran between forward and backward; else nothing is recorded."""
        seen = cls._running
        if seen is not None and seen.entry() is entry and alone and not seen.ended:
            seen.ended = True
            seen.end()

    def end(self) -> None:
        """Mark in the meter's events that the caller's own code ends here, unless that is marked already. Called when
        the backward reaches an operator that made one of the model's outputs."""
        if self is UntilBackward._running and not self._marked and self.read in PeakMeter.listeners:
            self._marked = True
            _mark(self._end_mark)

    @classmethod
    def drop(cls) -> None:
        """Stop observing the latest forward, as another one begins. If its backward has not begun, nothing is recorded
        for it."""
        if cls._running is None:
            return
        backward_starts(None)
        if not cls._running.ended:
            cls._running.entry = lambda: None
        cls._running = None

    @classmethod
    def look(cls, roots: Sequence[Any]) -> None:
        """Called when a backward starts at `roots` (tensors or edges). If its autograd graph leads to the latest
        forward, two figures of the caller's code between that forward and the backward are estimated from the graph:
        the bytes that this code holds, where the loss is outside of the model (`CallersCode.meanwhile`), and those of
        gradients of parameters that it uses itself (`Entry.given_bytes`). The model's entry keeps the largest of each.
        """
        seen = cls._running
        entry = None if seen is None else seen.entry()
        if seen is None or entry is None:
            return
        nodes, ends = graph_until(roots, lambda node: _RETURNED in node.metadata)
        if seen not in [node.metadata[_RETURNED]() for node in ends]:
            return
        backward_starts(None)
        ledger = Ledger.of(entry)
        if device_of(ledger.device).is_host:
            edges = [edge for node in nodes for edge, _ in node.next_functions]
            leaves = {edge.variable for edge in edges if hasattr(edge, "variable")}
            given = leaves and leaves & set(entry.model.parameters())
            entry.given_bytes = max(entry.given_bytes or 0, distinct_bytes(given) if given else 0)
        if not seen._loss_is_outside:
            return
        own = bytes_by_address([*entry.model.parameters(), *entry.model.buffers()], ledger.device)
        returned = bytes_still_there(seen._outputs)
        counted = (*own, *returned, *bytes_still_there(seen._given))
        freed = max(0, seen._returned_bytes - sum(returned.values()))
        saved, in_forward, in_backward = held_bytes(roots, nodes, ledger.device, counted)
        if not seen._seen.metered or seen._begins_with > seen._seen.returned_bytes:
            seen._seen.note(max(in_forward, in_backward - freed), seen._begins_with)
        _check(ledger, entry, saved)

    def read(self, events: Sequence[int]) -> None:
        """Called when the block of a meter ends: record the bytes that the caller's code held at most, from the meter's
        `events` in order (bytes allocated, and bytes freed as negative numbers), in the model's entry."""
        PeakMeter.listeners.remove(self.read)
        entry, begin, end = self.entry(), _marked(events, self._begin_mark), _marked(events, self._end_mark)
        if entry is not None and self.ended and begin is not None and end is not None and begin < end:
            if not self._seen.metered:
                self._seen.meanwhile, self._seen.metered = 0, True
            self._seen.note(max(accumulate(events[begin : end - 2]), default=0), self._begins_with)  # without the mark


def _check(ledger: Ledger, entry: Entry, saved_bytes: int) -> None:
    """Warn where the caller's operators have saved more since the forward than the budget has left for them, which is
    not known before. Raises `BudgetError` in a model that has not stepped where no plan would leave so much."""
    waiting = [forward for one in ledger.entries for forward in one.all_waiting()]
    if entry.fixed_bytes is not None or len(waiting) != 1:  # the graph may lead through other forwards
        return
    (forward,) = waiting
    account = replace(forward.account, other_forwards=0, elsewhere=0, tolerance=0)
    needed = account.resident_bytes + saved_bytes  # what is elsewhere may be among these, or be freed by now
    missing = max(0, account.optimizer_state - entry.found.state)
    if needed + forward.held_bytes - missing <= entry.budget_bytes + entry.tolerance_bytes:
        return
    elsewhere_bytes = entry.found.beside(account)
    works = needed + elsewhere_bytes + forward.saved_bytes() + entry.tolerance_bytes
    works = max(works, forward.runs_plain_from(elsewhere_bytes, 2 * works) or 0)
    reason = f"{size(saved_bytes)} that the caller's code saved between a forward and its backward"
    del forward, waiting  # else this frame, which is in the error's traceback, would hold the forward
    tell = entry.warn_beyond if needed <= entry.budget_bytes else entry.refuse
    tell(BudgetError(entry.budget_bytes, works, reason, least=False, further=(_BESIDE,)))


_BESIDE = (
    "such code is a loss outside of the model, or methods of the model that are called beside it, and no plan lowers "
    "what it saves; to have it planned, compute it within the model's forward, or give optimize the loss_fn"
)


def held_bytes(
    roots: Sequence[Any], nodes: Sequence[Any], device: torch.device, counted: Iterable[int] = ()
) -> tuple[int, int, int]:
    """Three numbers of bytes on a device: what these autograd nodes have saved, except at the addresses `counted`; an
    estimate of the most that their operators held in the forward; and one of the most that they hold in the backward.
    `nodes` are in the order in which the backward, which starts at `roots`, runs them.

    Both estimates include what the nodes have saved. The first adds the inputs and outputs of the operator that has the
    most bytes of them, taken to be as large as their gradients; the second adds the gradients that exist at the same
    time. Leaves and their gradients are not added."""
    saved = {node: bytes_by_address(saved_by(node), device) for node in nodes}
    readers: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for found in saved.values():
        sizes |= found
        for address in found:
            readers[address] = readers.get(address, 0) + 1
    left_out = {0, *counted}
    held = all_saved = sum(nbytes for address, nbytes in sizes.items() if address not in left_out)
    arrived = {(root.grad_fn, root.output_nr): root.nbytes for root in roots if isinstance(root, torch.Tensor)}
    largest = most = 0
    for node in nodes:
        edges = [edge for edge in node.next_functions if edge[0] is not None and not hasattr(edge[0], "variable")]
        made = sum(received_bytes(*edge) for edge in edges)
        received = sum(nbytes for (to, _), nbytes in arrived.items() if to is node)
        largest = max(largest, received + made)
        most = max(most, held + sum(arrived.values()) + made)
        arrived = {edge: nbytes for edge, nbytes in arrived.items() if edge[0] is not node}
        arrived |= {edge: received_bytes(*edge) for edge in edges}
        for address in saved[node]:
            readers[address] -= 1
            held -= sizes[address] if not readers[address] and address not in left_out else 0
    return all_saved, all_saved + largest, most


def staying(guessed_bytes: int) -> int:
    """The part of `guessed_bytes` that is assumed to stay allocated until the end of the backward. `guessed_bytes` is
    what a loss outside of the model may need beyond the bytes that are always assumed for it (`LOSS_OUTSIDE`)."""
    return guessed_bytes // _STAYING


def _end(seen: weakref.ref[UntilBackward], *_: object) -> None:
    if (found := seen()) is not None:
        found.end()


def _mark(nbytes: int) -> None:
    with without_modes():  # the user's modes must not see this allocation
        torch.empty(nbytes, dtype=torch.uint8)


def _marked(events: Sequence[int], nbytes: int) -> int | None:
    """The position in `events` right after the latest mark of this size; None if there is none."""
    found = [place for place in range(1, len(events)) if events[place - 1] == nbytes and events[place] == -nbytes]
    return found[-1] + 1 if found else None
