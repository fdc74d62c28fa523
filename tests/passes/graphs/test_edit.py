"""New calls, replaced nodes, and what goes when nothing reads it any more."""

import torch

from passes import erase_unread, format_graph, new_call, replace_node
from passes.graphs.edit import on_stored_values
from tests.passes.capture import Sketch, aten


def test_a_new_call_comes_from_where_the_other_does() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    relu = sketch.call(aten.relu.default, x)
    entries = {"stack_trace": "line 3", "partitioner_tag": "is_backward", "custom": {"note": 1}}
    relu.meta.update(entries, tensor_meta="of relu", original_aten=aten.relu.default)
    module = sketch.returns(relu)
    (x, relu, _) = module.graph.nodes
    with on_stored_values(module.graph), module.graph.inserting_before(relu):
        wide = new_call(relu, aten._to_copy.default, x, dtype=torch.float64, node_name="wide")
    assert wide.name == "wide"
    assert wide.meta["val"].dtype == torch.float64
    assert {key: value for key, value in wide.meta.items() if key != "val"} == entries


def test_pure_calls_that_nothing_reads_go_with_what_only_they_have_read() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    kept = sketch.call(aten.relu.default, x)
    sketch.call(aten.native_dropout.default, kept, 0.5, True)
    both = sketch.call(aten.add.Tensor, sketch.call(aten.neg.default, kept), sketch.call(aten.abs.default, kept))
    graph = sketch.returns(kept, both).graph
    nodes = {node.name: node for node in graph.nodes}
    replace_node(nodes["add"], nodes["relu"])
    erase_unread([nodes["native_dropout"], nodes["neg"], nodes["abs_1"], nodes["relu"]])
    assert "native_dropout" in format_graph(graph)  # it moves the generator on
    assert [node.name for node in graph.nodes] == ["x", "relu", "native_dropout", "output"]
