import operator

import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import EliminateDeadCode, diff_graphs, format_graph
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, gpt2, rows_above_zero, with_inputs


def with_dead_code() -> GraphModule:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    constant = sketch.constant("table", torch.zeros(4))
    sketch.call(aten.neg.default, sketch.call(aten.mul.Tensor, constant, 2.0))
    dropout = sketch.call(aten.native_dropout.default, x, 0.5, True)
    sketch.call(operator.getitem, dropout, 0)
    sketch.call(aten.copy_.default, x, sketch.call(aten.add.Tensor, x, 1))
    drawn = sketch.call(aten.rand_like.default, x)
    return sketch.returns(sketch.call(aten.relu.default, drawn))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(EliminateDeadCode()(with_dead_code())),
        """\
input primals_1: f32[4]
native_dropout: (f32[4], b8[4]) = aten.native_dropout(primals_1, 0.5, True)
add: f32[4] = aten.add.Tensor(primals_1, 1)
copy_: f32[4] = aten.copy_(primals_1, add)
rand_like: f32[4] = aten.rand_like(primals_1)
relu: f32[4] = aten.relu(rand_like)
return (relu,)""",
    )


def test_numbers_and_the_generator_stay() -> None:
    before = with_dead_code()
    assert_bitwise_equal(with_inputs(before), before, EliminateDeadCode()(before))


def test_nothing_dead_nothing_done() -> None:
    for captured in (gpt2(), rows_above_zero()):
        assert not diff_graphs(captured.graph_module, EliminateDeadCode()(captured.graph_module))


def test_assertions_stay() -> None:
    text = format_graph(EliminateDeadCode()(rows_above_zero().graph_module))
    assert text.count("aten._assert_scalar") == 2


def test_what_an_unreturned_gradient_leaves_dead_in_a_real_model() -> None:
    captured = gpt2()
    graph_module = EliminateDeadCode()(captured.graph_module)
    output = graph_module.graph.output_node()
    # The backward depends on tangents, which are inputs: dead unless returned.
    output.args = (output.args[0][: captured.forward_outputs],)
    after = EliminateDeadCode()(graph_module)
    assert len(after.graph.nodes) < len(graph_module.graph.nodes) / 2
    random = [node for node in after.graph.nodes if node.target is aten.native_dropout.default]
    assert len(random) == 7
