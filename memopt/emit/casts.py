"""Casts as inductor's own decompositions write them."""

from __future__ import annotations

import torch
from torch import fx

_CAST = torch.ops.prims.convert_element_type.default


def spell_casts(half: fx.GraphModule) -> None:
    """Replace the `aten._to_copy` casts that passes insert into joint graphs by `prims.convert_element_type`, into
    which inductor decomposes them; at this stage inductor no longer does so itself. Edits the graph."""
    for node in half.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        if set(node.kwargs) == {"dtype"}:
            node.target, node.args, node.kwargs = _CAST, (node.args[0], node.kwargs["dtype"]), {}
    half.recompile()
