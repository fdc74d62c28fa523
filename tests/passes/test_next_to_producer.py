import operator

import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import NextToProducer, diff_graphs, format_graph
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, gpt2, resnet, with_inputs

FUNCTIONAL = torch.ops._c10d_functional


def scattered() -> GraphModule:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    halves = sketch.call(aten.split.Tensor, x, 2)
    negated = sketch.call(aten.neg.default, x)
    second = sketch.call(operator.getitem, halves, 1)
    summed = sketch.call(aten.sum.default, negated)
    first = sketch.call(operator.getitem, halves, 0)
    return sketch.returns(sketch.call(aten.mul.Tensor, first, second), summed)


def test_golden() -> None:
    assert_expected_inline(
        format_graph(NextToProducer()(scattered())),
        """\
input primals_1: f32[4]
split: (f32[2], f32[2]) = aten.split.Tensor(primals_1, 2)
getitem: f32[2] = split[1]
getitem_1: f32[2] = split[0]
neg: f32[4] = aten.neg(primals_1)
sum_1: f32[] = aten.sum(neg)
mul: f32[2] = aten.mul.Tensor(getitem_1, getitem)
return (mul, sum_1)""",
    )


def test_numbers() -> None:
    before = scattered()
    assert_bitwise_equal(with_inputs(before), before, NextToProducer()(before))


def test_what_stands_right_stays() -> None:
    for captured in (gpt2(), resnet()):
        assert not diff_graphs(captured.graph_module, NextToProducer()(captured.graph_module))
    once = NextToProducer()(scattered())
    assert not diff_graphs(once, NextToProducer()(once))


def test_an_input_that_is_a_tuple_stays_among_the_inputs() -> None:
    sketch = Sketch()
    pair = sketch.graph.placeholder("pair")
    x = sketch.input("primals_1", 4)
    pair.meta["val"] = (x.meta["val"],)
    before = sketch.returns(sketch.call(operator.getitem, pair, 0))
    assert not diff_graphs(before, NextToProducer()(before))


def test_scattered_getitems_of_a_real_model() -> None:
    captured = gpt2()
    before = NextToProducer()(captured.graph_module)
    nodes = [node for node in before.graph.nodes if node.target is operator.getitem]
    for node in nodes:
        min(node.users).prepend(node) if node.users else before.graph.output_node().prepend(node)
    before.recompile()
    after = NextToProducer()(before)
    assert all(
        node.prev in (node.args[0], *node.args[0].users)
        for node in after.graph.nodes
        if node.target is operator.getitem
    )
    assert_bitwise_equal(captured, before, after)


def waits_late() -> GraphModule:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    summed = sketch.call(FUNCTIONAL.all_reduce.default, x, "sum", "0")
    negated = sketch.call(aten.neg.default, x)
    return sketch.returns(negated, sketch.call(FUNCTIONAL.wait_tensor.default, summed))


def test_golden_of_a_wait() -> None:
    assert_expected_inline(
        format_graph(NextToProducer()(waits_late())),
        """\
input primals_1: f32[4]
all_reduce: f32[4] = _c10d_functional.all_reduce(primals_1, 'sum', '0')
wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_reduce)
neg: f32[4] = aten.neg(primals_1)
return (neg, wait_tensor)""",
    )


def test_a_graph_whose_waits_come_at_once_stays() -> None:
    once = NextToProducer()(waits_late())
    assert not diff_graphs(once, NextToProducer()(once))
    captured = gpt2().graph_module
    assert not diff_graphs(captured, NextToProducer()(captured))


def test_a_wait_in_the_other_half_stays_there() -> None:
    before = waits_late()
    for node in before.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward" if node.name == "wait_tensor" else "is_forward"
    assert not diff_graphs(before, NextToProducer()(before))
