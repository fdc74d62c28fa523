import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import WaitAtOnce, diff_graphs, format_graph
from tests.passes.capture import Sketch, aten, gpt2

FUNCTIONAL = torch.ops._c10d_functional


def waits_late() -> GraphModule:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    summed = sketch.call(FUNCTIONAL.all_reduce.default, x, "sum", "0")
    negated = sketch.call(aten.neg.default, x)
    return sketch.returns(negated, sketch.call(FUNCTIONAL.wait_tensor.default, summed))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(WaitAtOnce()(waits_late())),
        """\
input primals_1: f32[4]
all_reduce: f32[4] = _c10d_functional.all_reduce(primals_1, 'sum', '0')
wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_reduce)
neg: f32[4] = aten.neg(primals_1)
return (neg, wait_tensor)""",
    )


def test_a_graph_whose_waits_come_at_once_stays() -> None:
    once = WaitAtOnce()(waits_late())
    assert not diff_graphs(once, WaitAtOnce()(once))
    captured = gpt2().graph_module
    assert not diff_graphs(captured, WaitAtOnce()(captured))


def test_a_wait_in_the_other_half_stays_there() -> None:
    before = waits_late()
    for node in before.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward" if node.name == "wait_tensor" else "is_forward"
    assert not diff_graphs(before, WaitAtOnce()(before))
