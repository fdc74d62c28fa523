"""The price of every node: seconds by the card's time model, workspace as measured or estimated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from memopt.pricing.hardware_table import Hardware
from memopt.pricing.price import NodePrice
from memopt.pricing.time_model import node_seconds
from memopt.pricing.workspace import measure_workspaces, workspace_bytes


def price_nodes(nodes: Sequence[fx.Node], card: Hardware) -> dict[fx.Node, NodePrice]:
    """Seconds and workspace of one evaluation of each node on `card`.

    On the CPU each kind of op is run once to see what its kernel allocates, unless it is large: those, and all ops of
    other cards, are estimated.
    """
    if card.name == "cpu":
        measured = measure_workspaces(nodes)
        return {
            node: NodePrice(node_seconds(node, card), measured[node].workspace_bytes, measured[node].output_bytes or 0)
            for node in nodes
        }
    return {node: NodePrice(node_seconds(node, card), workspace_bytes(node, "cuda")) for node in nodes}
