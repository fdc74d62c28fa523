"""The bytes that a compiled region holds in its forward and backward, found by a dry run of the generated code."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memopt.account.caching_allocator import SMALL_BYTES
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.host import HOST
from memopt.device.devices import device_of
from memopt.device.op_call import tensors_in
from memopt.emit.dry_run import Ledger, dry_run
from memopt.planning.refit import Footprint
from passes.graphs.node_facts import is_tangent


@dataclass(frozen=True)
class Half:
    """A forward or a backward: the code that inductor generated, and the inputs of the graph that it was generated
    from."""

    source: str = field(repr=False)
    inputs: Sequence[fx.Node] = field(repr=False)


@dataclass(frozen=True)
class Outputs:
    """The results of a forward that its caller gets, by their positions: how long each is held at least."""

    number: int
    """The number of outputs, which are the first results of the forward."""
    released: Collection[int] = ()
    """Those that are let go when the backward begins."""
    held: Collection[int] = ()
    """Those that are held to the end of the step, whatever the caller does."""


def footprint(forward: Half, backward: Half, outputs: Outputs) -> Footprint:
    """The bytes that both halves hold in a dry run. The caller keeps the outputs until the backward ends; on a card,
    the calls are also those of a caller who drops them before."""
    found, large = _dry_run(forward, backward, outputs, dropped=False)
    if not large:
        return found
    return replace(found, ways=found.ways + _dry_run(forward, backward, outputs, dropped=True)[0].ways)


def _dry_run(forward: Half, backward: Half, outputs: Outputs, *, dropped: bool) -> tuple[Footprint, bool]:
    """The bytes that both halves hold, and whether an output that the caller may drop is large, on a card. `dropped`:
    the caller drops these before the backward."""
    mode = FakeTensorMode()
    given = [_fresh(node.meta.get("val"), mode) for node in forward.inputs]
    device = next((value.device for value in given if isinstance(value, torch.Tensor)), HOST)
    kind = device_of(device)
    ledger = Ledger(device.type, kind.chip(device))
    ledger.exclude(given)
    results = list(dry_run(forward.source, list(given), mode, ledger))
    forward_bytes, held_bytes = ledger.peak_bytes, ledger.live_bytes
    positions = range(min(outputs.number, len(results)))
    held = [results[at] for at in positions if at in outputs.held]
    callers = [results[at] for at in positions if at not in outputs.held and at not in outputs.released]
    saved = results[outputs.number :]
    del results
    large = kind.caching and any(tensor.untyped_storage().nbytes() > SMALL_BYTES for tensor in tensors_in(callers))
    if dropped:
        callers.clear()
    tangents = [_fresh(node.meta.get("val"), mode) for node in backward.inputs if is_tangent(node)]
    ledger.peak_bytes = 0
    ledger.count(tangents)
    arguments = _arguments(backward, saved, tangents)
    del saved
    gradients = dry_run(backward.source, arguments, mode, ledger)
    assert len(held) + len(callers) <= outputs.number
    ways = (tuple(ledger.calls),) if kind.caching else ()
    assert gradients is not None
    return Footprint(forward_bytes, held_bytes, ledger.peak_bytes, ledger.live_bytes, ways), large


def _arguments(backward: Half, saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The arguments of the backward: the saved values, in the order of the forward's results, and the tangents."""
    remaining, gradients = iter(saved), iter(tangents)
    return [next(gradients) if is_tangent(node) else next(remaining) for node in backward.inputs]


def _fresh(value: Any, mode: FakeTensorMode) -> Any:
    """A fake tensor like the given one, in the mode of the dry run, with storage of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
