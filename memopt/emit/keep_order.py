"""Keeps products where the plan has them, past inductor's own rewriting of graphs."""

from __future__ import annotations

import torch
from torch import fx

from memopt.device.fusion import can_inline
from memopt.device.storages import is_view

aten = torch.ops.aten


def keep_products_early(half: fx.GraphModule) -> None:
    """Have inductor leave an `add` alone that comes much later than a product that it adds. Edits the graph.

    It would make one `addmm` of the two, in the place of the add, and hold both operands of the product until then: for
    the gradient of a weight that is used twice, through the whole backward. What it looks for is an add that reads a
    product itself, so that here it reads the product by way of two views, which cost nothing.
    """
    place = {node: number for number, node in enumerate(half.graph.nodes)}
    barriers = [place[node] for node in half.graph.nodes if _is_barrier(node)]
    for add in half.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for product in add.all_input_nodes:
            if product.target is aten.mm.default and any(place[product] < each < place[add] for each in barriers):
                add.replace_input_with(product, _turned_twice(product, add))
    half.recompile()


def _turned_twice(product: fx.Node, before: fx.Node) -> fx.Node:
    for _ in range(2):
        with before.graph.inserting_before(before):
            turned = before.graph.call_function(aten.permute.default, (product, [1, 0]))
        turned.meta.update(product.meta, val=product.meta["val"].t())
        product = turned
    return product


def _is_barrier(node: fx.Node) -> bool:
    """Whether the node is a kernel of its own."""
    return node.op == "call_function" and not (can_inline(node) or is_view(node))
