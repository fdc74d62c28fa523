"""The digest of collectives, by which ranks see whether their steps exchange alike."""

from __future__ import annotations

import torch
from torch import fx

from memopt.emit.emit import exchanges_of

REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


def graph_of(*sizes: int, collective: bool = True) -> fx.Graph:
    """A graph that sums values of these sizes over ranks, one after the other, or only computes their negatives."""
    graph = fx.Graph()
    for size in sizes:
        value = graph.placeholder(f"value_{size}")
        made = [graph.call_function(torch.ops.aten.neg.default, (value,))]
        if collective:
            made.append(graph.call_function(REDUCE, (made[0], "sum", "0")))
            made.append(graph.call_function(WAIT, (made[1],)))
        for node in (value, *made):
            node.meta["val"] = torch.empty(size, device="meta")
    graph.output(())
    return graph


def test_equal_orders_have_one_digest_and_others_have_others() -> None:
    digest = exchanges_of(graph_of(2, 3), graph_of(4))
    assert 0 < digest < 2**62
    assert digest == exchanges_of(graph_of(2), graph_of(3, 4))
    assert len({digest, exchanges_of(graph_of(3, 2), graph_of(4)), exchanges_of(graph_of(2, 3))}) == 3


def test_graphs_without_collectives_have_none() -> None:
    assert exchanges_of(graph_of(2, 3, collective=False)) == 0
