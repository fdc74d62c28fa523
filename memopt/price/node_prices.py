"""The prices of single nodes, which of them are scheduled, and the host's time for a step."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from memopt.device.calibration import calibrated_seconds
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.device.op_call import OpCall, op_call
from memopt.device.storages import is_mutation, is_view
from memopt.device.time_model import node_seconds, runs_kernel
from memopt.device.workspace import measure_workspaces, op_dry_run
from memopt.price.priced_graph import NodePrice
from passes.graphs.aliases import WAIT
from passes.graphs.node_facts import backward_nodes, block_of
from passes.ops.offload_ops import TRANSFERS

_PROJECTIONS = ("aten.mm.", "aten.addmm.")


def number_blocks(paths: Iterable[str]) -> dict[str, int]:
    """For each path of a module in a repeated block, the block's number. Paths outside of blocks are left out."""
    numbers: dict[str, int] = {}
    return {path: numbers.setdefault(block, len(numbers)) for path in paths if (block := block_of(path))}


def is_attention_core(node: fx.Node, path: str) -> bool:
    """Whether the node computes attention scores, their softmax or the weighted sum, and not a projection: judged by
    its operator, or by the `path` of its module where that names attention ("layers.0.attn")."""
    target = str(node.target)
    return "attention" in target or ("att" in path.lower() and not target.startswith(_PROJECTIONS))


def split_halves(graph: fx.Graph, fused: frozenset[fx.Node] = frozenset()) -> tuple[list[fx.Node], list[fx.Node]]:
    """The scheduled nodes of the forward and of the backward, each in program order, without `fused` ones."""
    late = backward_nodes(graph)
    scheduled = [node for node in graph.nodes if is_scheduled(node) and node not in fused]
    return [node for node in scheduled if node not in late], [node for node in scheduled if node in late]


def is_scheduled(node: fx.Node) -> bool:
    """Whether the node is an operator of a schedule: it allocates memory or has side effects.

    Views and elements of tuples are part of the node that they read, and copies to and from the host run beside."""
    if node.op != "call_function" or node.target in TRANSFERS:
        return False
    writes = is_mutation(node) or node.target is WAIT
    return writes or not (is_view(node) or node.target is operator.getitem)


def price_nodes(
    nodes: Sequence[fx.Node], card: Hardware, *, timed: bool = False, generated: frozenset[fx.Node] = frozenset()
) -> dict[fx.Node, NodePrice]:
    """Seconds and workspace of one evaluation of each node on `card`.

    On the CPU each distinct op is run once to measure what its kernel allocates and, if `timed`, its seconds; ops that
    are too large to run, and those of other devices, are estimated. If `timed`, the ops that make up most of the step
    are then timed one by one, on the CPU or on this machine's GPU. Nodes in `generated` run in kernels that a compiler
    generates, which have no temporaries."""
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
    """The price of a node on a GPU. It has the allocator's calls within the node (`NodePrice.calls`) for operators that
    are written in Python, those of a library, and those that allocate results in another order than they return."""
    call, device = op_call(node), device_of(card)
    dry_run = None if call is None else op_dry_run(call, device.type, card.chip) or device.library_run(call, card.chip)
    if dry_run is None:
        workspace = 0 if call is None else device.workspace(call, card.chip)
        return NodePrice(seconds, workspace, calls=() if call is None else device.result_calls(call, workspace))
    return NodePrice(seconds, dry_run.workspace_bytes, calls=dry_run.calls)


def _timed(modelled: Mapping[fx.Node, float], device: torch.device) -> dict[fx.Node, float]:
    """Seconds, timed on the device, of the nodes that make up most of the step; `modelled` has the estimates of all."""
    calls = {node: call for node in modelled if runs_kernel(node) and (call := op_call(node)) is not None}
    expected: Counter[OpCall] = Counter()
    for node, call in calls.items():
        expected[call] += modelled[node]  # type: ignore[assignment]
    found = calibrated_seconds(expected, device)
    return {node: found[call] for node, call in calls.items() if call in found}


_REGION_SECONDS = 2.5e-3
"""Seconds of a region: its guards, the check of what the device holds, autograd's node."""
_GRADIENT_SECONDS = 40e-6
"""Seconds of an input with a gradient: its guard, its place among the inputs, the return of its gradient."""


def host_seconds(regions: int, gradients: int) -> float:
    """Seconds that the host needs for a planned step beyond those for the same operators in a plain step: a constant
    for each of its `regions`, and one for each of the parameters' `gradients`.

    On a CPU they add to the step; on a GPU they are hidden while its queue of kernels is not empty. Both constants were
    measured on one core of a server (`benchmarks/host_time.py`)."""
    return regions * _REGION_SECONDS + gradients * _GRADIENT_SECONDS
