"""The price of every node: seconds by the card's time model, workspace as measured or estimated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from memopt.pricing.hardware_table import Hardware
from memopt.pricing.price import NodePrice
from memopt.pricing.time_model import node_seconds
from memopt.pricing.workspace import measure_workspaces, workspace_bytes


def price_nodes(
    nodes: Sequence[fx.Node], card: Hardware, *, timed: bool = False, generated: frozenset[fx.Node] = frozenset()
) -> dict[fx.Node, NodePrice]:
    """Seconds and workspace of one evaluation of each node on `card`.

    On the CPU each kind of op is run once to see what its kernel allocates and, where the plan is to be `timed`, how
    long it takes, unless it is large: those, and all ops of other cards, are estimated. Nodes that are `generated` run
    in kernels without temporaries.
    """
    if generated:
        prices = price_nodes([node for node in nodes if node not in generated], card, timed=timed)
        return prices | {node: NodePrice(node_seconds(node, card), 0) for node in nodes if node in generated}
    if card.name != "cpu":
        return {node: NodePrice(node_seconds(node, card), workspace_bytes(node, "cuda")) for node in nodes}
    prices = {}
    for node, measured in measure_workspaces(nodes).items():
        seconds = measured.seconds if timed else None
        seconds = node_seconds(node, card) if seconds is None else seconds
        prices[node] = NodePrice(seconds, measured.workspace_bytes, measured.output_bytes or 0)
    return prices
