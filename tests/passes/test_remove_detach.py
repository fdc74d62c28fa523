import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import RemoveDetach, diff_graphs, format_graph
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, dynamic_mlp, gpt2, resnet, with_inputs


def saved_tanh() -> GraphModule:
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", 4), sketch.input("tangents_1", 4)
    tanh = sketch.call(aten.tanh.default, x)
    saved = sketch.call(aten.detach.default, sketch.call(aten.alias.default, tanh))
    constant = sketch.call(aten.lift_fresh.default, sketch.constant("scale", torch.full((4,), 2.0)))
    scaled = sketch.call(aten.mul.Tensor, tanh, constant)
    return sketch.returns(scaled, sketch.call(aten.tanh_backward.default, tangent, saved))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(RemoveDetach()(saved_tanh())),
        """\
input primals_1: f32[4]
input tangents_1: f32[4]
tanh: f32[4] = aten.tanh(primals_1)
scale: f32[4] = self.scale
mul: f32[4] = aten.mul.Tensor(tanh, scale)
tanh_backward: f32[4] = aten.tanh_backward(tangents_1, tanh)
return (mul, tanh_backward)""",
    )


def test_numbers() -> None:
    before = saved_tanh()
    assert_bitwise_equal(with_inputs(before), before, RemoveDetach()(before))
    for captured in (gpt2(), resnet()):
        after = RemoveDetach()(captured.graph_module)
        assert diff_graphs(captured.graph_module, after).removed
        assert "aten.detach(" not in format_graph(after)
        assert_bitwise_equal(captured, captured.graph_module, after)


def test_results_that_would_become_one_tensor_stay() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    tanh = sketch.call(aten.tanh.default, x)
    twin, of_input = sketch.call(aten.detach.default, tanh), sketch.call(aten.alias.default, x)
    before = sketch.returns(tanh, twin, of_input)
    assert not diff_graphs(before, RemoveDetach()(before))


def test_of_two_returned_copies_one_stays() -> None:
    sketch = Sketch()
    tanh = sketch.call(aten.tanh.default, sketch.input("primals_1", 4))
    before = sketch.returns(sketch.call(aten.detach.default, tanh), sketch.call(aten.detach.default, tanh))
    after = RemoveDetach()(before)
    assert [node.name for node in after.graph.output_node().all_input_nodes] == ["tanh", "detach_1"]


def test_what_is_written_to_stays() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    detached = sketch.call(aten.detach.default, sketch.call(aten.tanh.default, x))
    sketch.call(aten.add_.Tensor, detached, 1.0)
    before = sketch.returns(sketch.call(aten.neg.default, detached))
    assert not diff_graphs(before, RemoveDetach()(before))


def test_nothing_detached_nothing_done() -> None:
    assert not diff_graphs(dynamic_mlp().graph_module, RemoveDetach()(dynamic_mlp().graph_module))


def test_a_returned_view_keeps_the_detach_that_is_all_it_has_of_its_own() -> None:
    sketch = Sketch()
    tanh = sketch.call(aten.tanh.default, sketch.input("primals_1", 4, 4))
    before_view = sketch.call(aten.select.int, sketch.call(aten.detach.default, tanh), 0, 0)
    after_view = sketch.call(aten.detach.default, sketch.call(aten.select.int, tanh, 0, 1))
    before = sketch.returns(tanh, before_view, after_view)
    assert not diff_graphs(before, RemoveDetach()(before))
