"""Stored values of calls whose arguments a pass has changed."""

import torch

from passes.graphs.edit import on_stored_values, refresh
from tests.passes.capture import Sketch, aten, rows_above_zero


def test_a_value_follows_its_arguments() -> None:
    sketch = Sketch()
    x, wide = sketch.input("x", 4, dtype=torch.bfloat16), sketch.input("wide", 2, 4)
    neg = sketch.call(aten.neg.default, x)
    graph = sketch.returns(neg).graph
    nodes = {node.name: node for node in graph.nodes}
    nodes["neg"].replace_input_with(nodes["x"], nodes["wide"])
    with on_stored_values(graph):
        refresh(nodes["neg"])
    assert (nodes["neg"].meta["val"].dtype, nodes["neg"].meta["val"].shape) == (torch.float32, wide.meta["val"].shape)


def test_sizes_that_depend_on_data_keep_their_symbols() -> None:
    graph = rows_above_zero().graph_module.graph
    (nonzero,) = graph.find_nodes(op="call_function", target=aten.nonzero.default)
    before = nonzero.meta["val"].shape
    with on_stored_values(graph):
        refresh(nonzero)
    assert nonzero.meta["val"].shape == before
