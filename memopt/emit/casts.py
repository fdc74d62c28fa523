"""Casts in inductor's own words."""

from __future__ import annotations

import torch
from torch import fx

_CAST = torch.ops.prims.convert_element_type.default


def spell_casts(half: fx.GraphModule) -> None:
    """Turn `aten._to_copy`, which passes on joint graphs insert, into the cast that inductor decomposes it to: it comes
    too late for inductor to do that itself. Edits the graph."""
    for node in half.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if set(node.kwargs) == {"dtype"}:
            node.target, node.args, node.kwargs = _CAST, (node.args[0], node.kwargs["dtype"]), {}
    half.recompile()
