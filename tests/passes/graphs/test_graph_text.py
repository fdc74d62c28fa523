"""Graphs and their differences as text."""

import dataclasses
import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph, GraphModule

from passes import copy_graph_module, diff_graphs, format_graph
from passes.graphs.graph_text import format_argument, format_dtype, format_value
from passes.graphs.node_facts import module_path
from tests.passes.capture import Sketch, aten, dynamic_mlp, gpt2


def test_every_kind_of_node_takes_one_line() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 2, 6)
    constant = sketch.constant("table", torch.zeros(3, dtype=torch.int64))
    split = sketch.call(aten.split_with_sizes.default, x, [2, 4], 1)
    left = sketch.call(operator.getitem, split, 0)
    cast = sketch.call(aten.to.dtype, left, torch.bfloat16, copy=True)
    joined = sketch.call(aten.cat.default, [cast, cast], -1)
    full = sketch.call(aten.full.default, [2], float("inf"), device=torch.device("cpu"), pin_memory=False)
    graph_module = sketch.returns(joined, None, full, constant)
    assert_expected_inline(
        format_graph(graph_module),
        """\
input primals_1: f32[2, 6]
table: i64[3] = self.table
split_with_sizes: (f32[2, 2], f32[2, 4]) = aten.split_with_sizes(primals_1, [2, 4], 1)
getitem: f32[2, 2] = split_with_sizes[0]
to: bf16[2, 2] = aten.to.dtype(getitem, bf16, copy=True)
cat: bf16[2, 4] = aten.cat([to, to], -1)
full: f32[2] = aten.full([2], inf, device=cpu, pin_memory=False)
return (cat, None, full, table)""",
    )


def test_higher_order_operators_name_the_operator_they_run() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    drawn = sketch.call(torch.ops.higher_order.run_and_save_rng_state, aten.native_dropout.default, x, 0.5, True)
    state = sketch.call(operator.getitem, drawn, 0)
    sketch.call(torch.ops.higher_order.run_with_rng_state, state, aten.native_dropout.default, x, 0.5, True)
    assert_expected_inline(
        format_graph(sketch.returns(x)),
        """\
input primals_1: f32[4]
run_and_save_rng_state: (u8[5056], (f32[4], b8[4])) = run_and_save_rng_state(aten.native_dropout, primals_1, 0.5, True)
getitem: u8[5056] = run_and_save_rng_state[0]
run_with_rng_state: (f32[4], b8[4]) = run_with_rng_state(getitem, aten.native_dropout, primals_1, 0.5, True)
return (primals_1,)""",
    )


def test_a_graph_without_metadata_prints_too() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("reshape", (x, slice(1, None), {"a": 1.0})))
    assert_expected_inline(
        format_graph(graph),
        """\
input x
reshape = call_method.reshape(x, 1:, {a: 1.0})
return reshape""",
    )


def test_sizes_that_are_symbols_print_as_expressions() -> None:
    lines = format_graph(dynamic_mlp().graph_module).splitlines()
    batch, width = (line.partition("Sym(")[2].rstrip(")") for line in lines if "input" in line and "Sym" in line)
    assert f"input primals_5: f32[{batch}, {width}, 4]" in lines
    assert any(line.startswith(f"mul_6: Sym({batch}*{width}) = operator.mul(primals_3, primals_4)") for line in lines)


def test_a_node_without_a_module_has_no_path() -> None:
    graph = Graph()
    assert module_path(graph.placeholder("x")) == ""


def test_dtypes_are_short() -> None:
    names = "float32 float64 bfloat16 float16 int64 int8 uint8 uint16 bool complex64 float8_e4m3fn float8_e5m2"
    short = " ".join(format_dtype(getattr(torch, name)) for name in names.split())
    assert_expected_inline(short, """f32 f64 bf16 f16 i64 i8 u8 u16 b8 c64 f8_e4m3fn f8_e5m2""")


def test_values_and_arguments() -> None:
    assert format_value((torch.zeros(2), None, 3, [True])) == "(f32[2], None, 3, (True))"
    assert format_value(object()) == "object"
    assert format_argument((1,)) == "(1,)"
    assert format_argument([1.0, -0.0, "a", None]) == "[1.0, -0.0, 'a', None]"
    assert format_argument(slice(0, 4, 2)) == "0:4:2"
    assert format_argument(torch.strided) == "strided"
    assert format_argument(operator.add) == "operator.add"


def test_printing_is_deterministic() -> None:
    assert format_graph(gpt2().graph_module) == format_graph(gpt2().graph_module.graph)


def chain() -> GraphModule:
    sketch = Sketch()
    x, weight = sketch.input("primals_1", 2, 3), sketch.input("primals_2", 3, 3)
    tangent = sketch.input("tangents_1", 2, 3)
    hidden = sketch.call(aten.mm.default, x, weight)
    relu = sketch.call(aten.relu.default, hidden)
    out = sketch.call(aten.mul.Tensor, relu, 2.0)
    grad = sketch.call(aten.mul.Tensor, tangent, 2.0)
    grad = sketch.call(aten.threshold_backward.default, grad, relu, 0)
    transposed = sketch.call(aten.t.default, x)
    grad = sketch.call(aten.mm.default, transposed, grad)
    return sketch.returns(out, None, grad)


def test_equal_graphs_have_no_difference() -> None:
    diff = diff_graphs(chain(), copy_graph_module(chain()))
    assert not diff
    assert str(diff) == ""
    assert diff.summary() == "no change"


def test_recomputed_copies_read_well() -> None:
    before, after = chain(), chain()
    named = {node.name: node for node in after.graph.nodes}
    with after.graph.inserting_before(named["threshold_backward"]):
        mm = after.graph.create_node("call_function", aten.mm.default, named["mm"].args, name="mm_again")
        relu = after.graph.create_node("call_function", aten.relu.default, (mm,), name="relu_again")
    mm.meta, relu.meta = dict(named["mm"].meta), dict(named["relu"].meta)
    named["threshold_backward"].replace_input_with(named["relu"], relu)
    diff = diff_graphs(before, after)
    assert diff.added == ("mm_again", "relu_again")
    assert diff.changed == ("threshold_backward",)
    assert_expected_inline(
        str(diff),
        """\
# 2 added, 1 changed
@@ -6,5 +6,7 @@
  mul: f32[2, 3] = aten.mul.Tensor(relu, 2.0)
  mul_1: f32[2, 3] = aten.mul.Tensor(tangents_1, 2.0)
+ mm_again: f32[2, 3] = aten.mm(primals_1, primals_2)
+ relu_again: f32[2, 3] = aten.relu(mm_again)
- threshold_backward: f32[2, 3] = aten.threshold_backward(mul_1, relu, 0)
+ threshold_backward: f32[2, 3] = aten.threshold_backward(mul_1, relu_again, 0)
  t: f32[3, 2] = aten.t(primals_1)
  mm_1: f32[3, 3] = aten.mm(t, threshold_backward)""",
    )


def test_removed_and_moved_nodes_show_where_they_stood() -> None:
    before, after = chain(), chain()
    named = {node.name: node for node in after.graph.nodes}
    named["mul"].replace_all_uses_with(named["relu"])
    after.graph.erase_node(named["mul"])
    named["primals_2"].append(named["t"])
    diff = diff_graphs(before, after, context=1)
    assert diff.removed == ("mul",)
    assert diff.moved == ("t",)
    assert_expected_inline(
        str(diff),
        """\
# 1 removed, 1 changed, 1 moved
@@ -2,2 +2,3 @@
  input primals_2: f32[3, 3]
+ t: f32[3, 2] = aten.t(primals_1)
  input tangents_1: f32[2, 3]
@@ -5,7 +6,5 @@
  relu: f32[2, 3] = aten.relu(mm)
- mul: f32[2, 3] = aten.mul.Tensor(relu, 2.0)
  mul_1: f32[2, 3] = aten.mul.Tensor(tangents_1, 2.0)
  threshold_backward: f32[2, 3] = aten.threshold_backward(mul_1, relu, 0)
- t: f32[3, 2] = aten.t(primals_1)
  mm_1: f32[3, 3] = aten.mm(t, threshold_backward)
- return (mul, None, mm_1)
+ return (relu, None, mm_1)""",
    )


def test_the_same_call_under_another_name_is_renamed() -> None:
    before, after = chain(), chain()
    for node in after.graph.nodes:
        if node.op == "call_function":
            node.name = f"other_{node.name}"
    diff = diff_graphs(before, after)
    assert [old for old, _ in diff.renamed] == ["mm", "relu", "mul", "mul_1", "threshold_backward", "t", "mm_1"]
    assert (diff.added, diff.removed, diff.changed, diff.moved) == ((), (), (), ())
    assert str(diff) == "# 7 renamed"


def test_a_stale_type_is_a_change() -> None:
    before, after = chain(), chain()
    node = next(node for node in after.graph.nodes if node.name == "relu")
    node.meta["val"] = node.meta["val"].double()
    assert diff_graphs(before, after).changed == ("relu",)


def test_a_diff_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        diff_graphs(chain(), chain()).added = ()  # type: ignore[misc]


def test_line_numbers_are_those_of_the_two_graphs() -> None:
    before, after = gpt2().graph_module, copy_graph_module(gpt2().graph_module)
    nodes = list(after.graph.nodes)
    nodes[100].args = (*nodes[100].args[:-1], 7)
    first, *_ = (line for line in str(diff_graphs(before, after, context=0)).splitlines() if line.startswith("@@"))
    assert first == "@@ -101,1 +101,1 @@"
