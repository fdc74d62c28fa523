"""Keeps matrix products in their planned position, where inductor's graph passes would move them."""

from __future__ import annotations

import torch
from torch import fx

from memopt.device.storages import can_inline, is_view

aten = torch.ops.aten


def keep_products_early(half: fx.GraphModule) -> None:
    """Prevent inductor from fusing an `add` with a matrix product that is computed much earlier. Edits the graph.

    Inductor would replace both by one `addmm` in the position of the add, which keeps both operands of the product
    alive until then: for the gradient of a weight that is used twice, through the whole backward. It looks for an add
    that reads a product directly, so here the add reads the product through two views, which cost nothing.
    """
    place = {node: number for number, node in enumerate(half.graph.nodes)}
    barriers = [place[node] for node in half.graph.nodes if _is_barrier(node)]
    for add in half.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for product in add.all_input_nodes:
            if product.target is aten.mm.default and any(place[product] < barrier < place[add] for barrier in barriers):
                add.replace_input_with(product, _transposed_twice(product, add))
    half.recompile()


def _transposed_twice(product: fx.Node, before: fx.Node) -> fx.Node:
    """The product transposed twice, by views inserted before the node `before`."""
    for _ in range(2):
        with before.graph.inserting_before(before):
            transposed = before.graph.call_function(aten.permute.default, (product, [1, 0]))
        transposed.meta.update(product.meta, val=product.meta["val"].t())
        product = transposed
    return product


def _is_barrier(node: fx.Node) -> bool:
    """Whether the node runs as a kernel of its own."""
    return node.op == "call_function" and not (can_inline(node) or is_view(node))
