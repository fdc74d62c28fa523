"""The bytes that a compiled region holds in its forward and backward, found by a dry run of the generated code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memopt.compat.fakes import FakeTensorMode
from memopt.device.chip import LARGE
from memopt.device.hardware_table import reported_chip
from memopt.emit.dry_run import Ledger, dry_run
from memopt.planning.footprint import Footprint
from passes.graphs.node_facts import is_tangent


@dataclass(frozen=True)
class Half:
    """A forward or a backward: the code that inductor generated, and the inputs of the graph that it was generated
    from."""

    source: str = field(repr=False)
    inputs: Sequence[fx.Node] = field(repr=False)


def footprint(forward: Half, backward: Half, outputs: int) -> Footprint:
    """The bytes that both halves hold in a dry run. The forward's first `outputs` results belong to its caller, who
    keeps them until the backward ends."""
    mode = FakeTensorMode()
    given = [_fresh(node.meta.get("val"), mode) for node in forward.inputs]
    device = next((value.device for value in given if isinstance(value, torch.Tensor)), torch.device("cpu"))
    on_card = device.type == "cuda"
    ledger = Ledger(device.type, reported_chip(device) if on_card else LARGE)
    ledger.exclude(given)
    results = list(dry_run(forward.source, list(given), mode, ledger))
    forward_bytes, held_bytes = ledger.peak_bytes, ledger.live_bytes
    kept, saved = results[:outputs], results[outputs:]
    del results
    tangents = [_fresh(node.meta.get("val"), mode) for node in backward.inputs if is_tangent(node)]
    ledger.peak_bytes = 0
    ledger.count(tangents)
    arguments = _arguments(backward, saved, tangents)
    del saved
    gradients = dry_run(backward.source, arguments, mode, ledger)
    left, calls = ledger.live_bytes, tuple(ledger.calls) if on_card else ()
    assert len(kept) <= outputs
    assert gradients is not None
    return Footprint(forward_bytes, held_bytes, ledger.peak_bytes, left, calls)


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
