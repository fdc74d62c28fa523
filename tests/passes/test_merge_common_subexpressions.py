import operator

import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule, Node

from passes import EliminateDeadCode, MergeCommonSubexpressions, diff_graphs, format_graph
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, gpt2, resnet, rows_above_zero, with_inputs


def twice(size: int = 4) -> GraphModule:
    """The same sine in the forward and twice in the backward, the same view in both, and a tuple twice."""
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", size, 2), sketch.input("tangents_1", size, 2)
    tops = [sketch.call(operator.getitem, sketch.call(aten.max.dim, x, 1), 0) for _ in range(2)]
    sine = sketch.call(aten.sin.default, x)
    grads = []
    for _ in range(2):
        again = sketch.call(aten.sin.default, x)
        again.meta["partitioner_tag"] = "is_backward"
        grads.append(sketch.call(aten.mul.Tensor, tangent, again))
    grads.append(sketch.call(aten.mm.default, sketch.call(aten.t.default, x), grads[0]))
    grads.append(sketch.call(aten.mm.default, sketch.call(aten.t.default, x), grads[1]))
    return sketch.returns(sketch.call(aten.add.Tensor, *tops), sketch.call(aten.neg.default, sine), *grads)


def test_golden() -> None:
    assert_expected_inline(
        format_graph(MergeCommonSubexpressions()(twice())),
        """\
input primals_1: f32[4, 2]
input tangents_1: f32[4, 2]
max_1: (f32[4], i64[4]) = aten.max.dim(primals_1, 1)
getitem: f32[4] = max_1[0]
sin: f32[4, 2] = aten.sin(primals_1)
mul: f32[4, 2] = aten.mul.Tensor(tangents_1, sin)
mul_1: f32[4, 2] = aten.mul.Tensor(tangents_1, sin)
t: f32[2, 4] = aten.t(primals_1)
mm: f32[2, 2] = aten.mm(t, mul)
mm_1: f32[2, 2] = aten.mm(t, mul_1)
add: f32[4] = aten.add.Tensor(getitem, getitem)
neg: f32[4, 2] = aten.neg(sin)
return (add, neg, mul, mul_1, mm, mm_1)""",
    )


def test_large_values_are_not_kept_from_the_forward_for_the_backward() -> None:
    after = MergeCommonSubexpressions(across_halves_bytes=16)(twice())
    assert len(after.graph.find_nodes(op="call_function", target=aten.sin.default)) == 2
    assert len(after.graph.find_nodes(op="call_function", target=aten.t.default)) == 1


def test_numbers() -> None:
    for options in ({}, {"across_halves_bytes": 0}):
        merge = MergeCommonSubexpressions(**options)
        assert_bitwise_equal(with_inputs(twice()), twice(), merge(twice()))
        for captured in (gpt2(), resnet(), rows_above_zero()):
            assert_bitwise_equal(captured, captured.graph_module, merge(captured.graph_module))


def unmerged(sketch: Sketch, *returned: Node) -> bool:
    before = sketch.returns(*returned)
    return not diff_graphs(before, MergeCommonSubexpressions()(before))


def test_random_calls_stay_apart() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    assert unmerged(sketch, sketch.call(aten.sub.Tensor, *(sketch.call(aten.rand_like.default, x) for _ in range(2))))


def test_reads_on_either_side_of_a_write_stay_apart() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    before = sketch.call(aten.sin.default, x)
    sketch.call(aten.copy_.default, x, sketch.call(aten.neg.default, before))
    assert unmerged(sketch, sketch.call(aten.sub.Tensor, before, sketch.call(aten.sin.default, x)))


def test_what_is_written_to_stays_apart() -> None:
    sketch = Sketch()
    first, second = (sketch.call(aten.zeros.default, [4]) for _ in range(2))
    sketch.call(aten.add_.Tensor, first, 1.0)
    assert unmerged(sketch, sketch.call(aten.sub.Tensor, first, second))


def test_what_is_returned_stays_apart() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    first, second = (sketch.call(aten.sin.default, x) for _ in range(2))
    assert unmerged(sketch, first, sketch.call(aten.view.default, second, [2, 2]))


def test_numbers_of_other_types_stay_apart() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4, dtype=torch.int64)
    products = [sketch.call(aten.mul.Tensor, x, number) for number in (1, 1.0, True)]
    assert unmerged(sketch, sketch.call(aten.cat.default, products))


def test_sizes_that_depend_on_data_stay_apart() -> None:
    sketch = Sketch()
    x = sketch.input("primals_1", 4)
    found = [sketch.call(aten.nonzero.default, x) for _ in range(2)]
    assert unmerged(sketch, *(sketch.call(aten.sum.default, found_one) for found_one in found))


def test_merging_leaves_nothing_dead() -> None:
    merged = MergeCommonSubexpressions()(gpt2().graph_module)
    assert diff_graphs(gpt2().graph_module, merged)
    assert not diff_graphs(merged, EliminateDeadCode()(merged))
