import dataclasses

import pytest
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import copy_graph_module, diff_graphs
from tests.passes.capture import Sketch, aten, gpt2


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
