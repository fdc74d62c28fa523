from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline

from passes import CANONICAL, diff_graphs, format_graph
from passes.graphs.verify import verify
from tests.passes.capture import Captured, assert_bitwise_equal, dynamic_mlp, gpt2, resnet, rows_above_zero

CAPTURED = [gpt2, resnet, rows_above_zero, dynamic_mlp]
by_name = pytest.mark.parametrize("captured", CAPTURED, ids=lambda function: function.__name__)


def test_the_order_of_passes() -> None:
    assert_expected_inline(
        str(CANONICAL),
        """\
Pipeline([
    EliminateDeadCode(),
    RemoveDetach(),
    ForwardWrites(),
    MergeCommonSubexpressions(across_halves_bytes=65536),
    NextToProducer(),
])""",
    )


@by_name
def test_the_same_numbers(captured: Callable[[], Captured]) -> None:
    before = captured().graph_module
    text = format_graph(before)
    after = CANONICAL(before)
    verify(after)
    assert format_graph(before) == text
    assert_bitwise_equal(captured(), before, after)


@by_name
def test_the_canonical_form_stays_untouched(captured: Callable[[], Captured]) -> None:
    once = CANONICAL(captured().graph_module)
    assert not diff_graphs(once, CANONICAL(once))


@by_name
def test_inputs_outputs_and_metadata_survive(captured: Callable[[], Captured]) -> None:
    before, after = captured().graph_module, CANONICAL(captured().graph_module)
    old = {node.name: node for node in before.graph.nodes}
    for node in after.graph.nodes:
        assert node.meta.keys() == old[node.name].meta.keys()
        assert all(node.meta[key] is old[node.name].meta[key] for key in node.meta)
    inputs = [[node.name for node in module.graph.find_nodes(op="placeholder")] for module in (before, after)]
    assert inputs[0] == inputs[1]
    outputs = [module.graph.output_node().args[0] for module in (before, after)]
    assert [node is None for node in outputs[0]] == [node is None for node in outputs[1]]


def test_the_whole_graph_is_right_after_each_pass() -> None:
    stages = CANONICAL.stages(gpt2().graph_module)
    assert len(stages) == len(CANONICAL)
    for stage in stages:
        verify(stage)


def test_what_canonicalising_does_to_a_resnet() -> None:
    before = resnet().graph_module
    assert_expected_inline(
        str(diff_graphs(before, CANONICAL(before), context=0)),
        """\
# 10 removed, 5 changed
@@ -41,1 +41,0 @@
- detach: f32[2, 8, 8, 8] = aten.detach(relu)
@@ -52,1 +51,0 @@
- detach_1: f32[2, 8, 8, 8] = aten.detach(relu_1)
@@ -62,1 +60,0 @@
- detach_2: f32[2, 8, 8, 8] = aten.detach(relu_2)
@@ -73,1 +70,0 @@
- detach_3: f32[2, 8, 8, 8] = aten.detach(relu_3)
@@ -81,3 +77,1 @@
- detach_4: f32[2, 5] = aten.detach(_log_softmax)
- detach_5: f32[2, 5] = aten.detach(detach_4)
- _log_softmax_backward_data: f32[2, 5] = aten._log_softmax_backward_data(tangents_1, detach_5, -1, f32)
+ _log_softmax_backward_data: f32[2, 5] = aten._log_softmax_backward_data(tangents_1, _log_softmax, -1, f32)
@@ -94,2 +88,1 @@
- detach_6: f32[2, 8, 8, 8] = aten.detach(detach_3)
- threshold_backward: f32[2, 8, 8, 8] = aten.threshold_backward(max_pool2d_with_indices_backward, detach_6, 0)
+ threshold_backward: f32[2, 8, 8, 8] = aten.threshold_backward(max_pool2d_with_indices_backward, relu_3, 0)
@@ -103,2 +96,1 @@
- detach_7: f32[2, 8, 8, 8] = aten.detach(detach_2)
- threshold_backward_1: f32[2, 8, 8, 8] = aten.threshold_backward(getitem_25, detach_7, 0)
+ threshold_backward_1: f32[2, 8, 8, 8] = aten.threshold_backward(getitem_25, relu_2, 0)
@@ -113,2 +105,1 @@
- detach_8: f32[2, 8, 8, 8] = aten.detach(detach_1)
- threshold_backward_2: f32[2, 8, 8, 8] = aten.threshold_backward(add_6, detach_8, 0)
+ threshold_backward_2: f32[2, 8, 8, 8] = aten.threshold_backward(add_6, relu_1, 0)
@@ -122,2 +113,1 @@
- detach_9: f32[2, 8, 8, 8] = aten.detach(detach)
- threshold_backward_3: f32[2, 8, 8, 8] = aten.threshold_backward(getitem_37, detach_9, 0)
+ threshold_backward_3: f32[2, 8, 8, 8] = aten.threshold_backward(getitem_37, relu, 0)""",
    )
