"""Prices of nodes: seconds by the device's time model or as timed, workspaces as measured or estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from memopt.device.calibration import calibrated_seconds
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.device.op_call import OpCall, op_call
from memopt.device.time_model import node_seconds, runs_kernel
from memopt.device.workspace import measure_workspaces, rehearsal, workspace_bytes
from memopt.price.priced_graph import NodePrice


def price_nodes(
    nodes: Sequence[fx.Node], card: Hardware, *, timed: bool = False, generated: frozenset[fx.Node] = frozenset()
) -> dict[fx.Node, NodePrice]:
    """Seconds and workspace of one evaluation of each node on `card`.

    On the CPU each distinct op is run once to measure what its kernel allocates and, if `timed`, its seconds; ops that
    are too large to run, and those of other devices, are estimated. If `timed`, the ops that make up most of the step
    are then timed one by one, on the CPU or on this machine's GPU. Nodes that are `generated` run in compiled kernels
    without temporaries.
    """
    if generated:
        prices = price_nodes([node for node in nodes if node not in generated], card, timed=timed)
        return prices | {node: NodePrice(node_seconds(node, card), 0) for node in nodes if node in generated}
    modelled = {node: node_seconds(node, card) for node in nodes}
    device = device_of(card)
    if not device.is_host:
        seconds = modelled | (_timed(modelled, torch.device(device.type)) if timed else {})
        return {node: _on_card(node, seconds[node], card) for node in nodes}
    found = measure_workspaces(nodes)
    seconds = dict(modelled)
    if timed:
        once = {node: measured.seconds for node, measured in found.items() if measured.seconds is not None}
        seconds |= once
        timed_here = once | _timed(seconds, torch.device(device.type))
        seconds |= {node: timed_seconds + card.between_seconds for node, timed_seconds in timed_here.items()}
    return {
        node: NodePrice(seconds[node], measured.workspace_bytes, measured.output_bytes or 0)
        for node, measured in found.items()
    }


def _on_card(node: fx.Node, seconds: float, card: Hardware) -> NodePrice:
    """The price of a node on a GPU: with each block that it allocates, if it is written in Python or a library's, or
    allocates its results in another order than it returns them."""
    call, device = op_call(node), device_of(card)
    rehearsed = None if call is None else rehearsal(call, device.type, card.chip) or device.library_run(call, card.chip)
    if rehearsed is None:
        workspace = workspace_bytes(node, device.type, card.chip)
        return NodePrice(seconds, workspace, calls=() if call is None else device.result_calls(call, workspace))
    return NodePrice(seconds, rehearsed.workspace_bytes, calls=rehearsed.calls)


def _timed(modelled: Mapping[fx.Node, float], device: torch.device) -> dict[fx.Node, float]:
    """Seconds, timed on the device, of the nodes that make up most of the step; `modelled` has the estimates of all."""
    calls = {node: call for node in modelled if runs_kernel(node) and (call := op_call(node)) is not None}
    expected: Counter[OpCall] = Counter()
    for node, call in calls.items():
        expected[call] += modelled[node]  # type: ignore[assignment]
    found = calibrated_seconds(expected, device)
    return {node: found[call] for node, call in calls.items() if call in found}
