"""The price of every node: seconds by the card's time model, workspace as measured or estimated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from memopt.device.calibration import calibrated_seconds
from memopt.device.hardware_table import Hardware
from memopt.device.op_call import OpCall, op_call
from memopt.device.time_model import node_seconds, runs_kernel
from memopt.device.workspace import measure_workspaces, workspace_bytes
from memopt.price.price import NodePrice


def price_nodes(
    nodes: Sequence[fx.Node], card: Hardware, *, timed: bool = False, generated: frozenset[fx.Node] = frozenset()
) -> dict[fx.Node, NodePrice]:
    """Seconds and workspace of one evaluation of each node on `card`.

    On the CPU each kind of op is run once to see what its kernel allocates and, where the plan is to be `timed`, how
    long it takes, unless it is large: those, and all ops of other cards, are estimated. Where it is to be timed, the
    ops that make up most of the step then are timed by themselves, on the GPU too, if it is one at hand. Nodes that are
    `generated` run in kernels without temporaries.
    """
    if generated:
        prices = price_nodes([node for node in nodes if node not in generated], card, timed=timed)
        return prices | {node: NodePrice(node_seconds(node, card), 0) for node in nodes if node in generated}
    modelled = {node: node_seconds(node, card) for node in nodes}
    if card.name != "cpu":
        seconds = modelled | (_timed(modelled, torch.device("cuda")) if timed else {})
        return {node: NodePrice(seconds[node], workspace_bytes(node, "cuda")) for node in nodes}
    found = measure_workspaces(nodes)
    seconds = dict(modelled)
    if timed:
        once = {node: each.seconds for node, each in found.items() if each.seconds is not None}
        seconds |= once
        timed_here = once | _timed(seconds, torch.device("cpu"))
        seconds |= {node: each + card.between_seconds for node, each in timed_here.items()}
    return {
        node: NodePrice(seconds[node], each.workspace_bytes, each.output_bytes or 0) for node, each in found.items()
    }


def _timed(modelled: Mapping[fx.Node, float], device: torch.device) -> dict[fx.Node, float]:
    """Seconds of the nodes that make up most of the step, as timed on the device."""
    calls = {node: call for node in modelled if runs_kernel(node) and (call := op_call(node)) is not None}
    expected: Counter[OpCall] = Counter()
    for node, call in calls.items():
        expected[call] += modelled[node]  # type: ignore[assignment]
    found = calibrated_seconds(expected, device)
    return {node: found[call] for node, call in calls.items() if call in found}
