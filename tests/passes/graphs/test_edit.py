"""Edits of graphs, stored values that follow them, and code that is generated late."""

import copy
import pickle

import torch
from torch import fx

from passes import erase_unread, format_graph, new_call, replace_node
from passes.graphs.edit import LazyCode, on_stored_values, place_calls, refresh
from tests.passes.capture import Sketch, aten, rows_above_zero


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


def test_calls_without_module_and_line_take_those_of_their_reader() -> None:
    """As the calls that torch's pattern matcher makes; tests/checks/test_lock.py has a step of a model."""
    sketch = Sketch()
    x = sketch.input("x", 4)
    first = sketch.call(aten.abs.default, x)
    second, third = sketch.call(aten.neg.default, first), sketch.call(aten.relu.default, first)
    graph = sketch.returns(second, third).graph
    nodes = {node.name: node for node in graph.nodes}
    nodes["neg"].meta["stack_trace"] = "line 3"
    nodes["relu"].meta["nn_module_stack"] = {"h.1": ("h.1", torch.nn.ReLU)}
    nodes["abs_1"].meta["partitioner_tag"] = "is_forward"
    place_calls(graph)
    assert nodes["abs_1"].meta["stack_trace"] == "line 3"
    assert nodes["abs_1"].meta["partitioner_tag"] == "is_forward"
    assert "stack_trace" not in nodes["relu"].meta


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


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def made() -> LazyCode:
    traced = fx.symbolic_trace(double)
    return LazyCode(traced, traced.graph, "Double")


def squared(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = torch.mul
    module.recompile()


def test_a_call_runs_the_graph_as_it_is_now() -> None:
    module, three = made(), torch.tensor(3.0)
    assert module(three) == 6
    squared(module)
    assert module(three) == 9
    assert module.forward(three) == 9


def test_the_code_is_that_of_the_graph_as_it_is_now() -> None:
    module = made()
    assert "x + x" in module.code
    squared(module)
    assert "torch.mul(x, x)" in module.code
    assert "torch.mul(x, x)" in str(module)


def test_nothing_is_compiled_before_that() -> None:
    module = made()
    assert not hasattr(module, "_code")
    assert "x + x" in module.code


def test_two_modules_keep_apart() -> None:
    one, other, three = made(), made(), torch.tensor(3.0)
    squared(other)
    assert (one(three), other(three)) == (6, 9)


def test_copies_and_pickles() -> None:
    module, three = made(), torch.tensor(3.0)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again(three) == 6
        squared(again)
        assert again(three) == 9
    assert module(three) == 6
