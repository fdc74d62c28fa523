from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph, GraphModule, Node

from passes import EliminateDeadCode, MergeCasts, Pipeline, diff_graphs, format_graph, merge_casts
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, with_inputs

BF16, FP32 = torch.bfloat16, torch.float32
MERGE = Pipeline((MergeCasts(), EliminateDeadCode()))


def expanded() -> GraphModule:
    sketch = Sketch()
    x = sketch.input("x", 1, 4)
    low = sketch.call(aten.to.dtype, sketch.call(aten.expand.default, x, [8, 4]), BF16)
    again = sketch.call(aten.to.dtype, sketch.call(aten.to.dtype, low, FP32), BF16)
    return sketch.returns(sketch.call(aten.neg.default, again), sketch.call(aten.exp.default, low))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(MERGE(expanded())),
        """\
input x: f32[1, 4]
to_3: bf16[1, 4] = aten.to.dtype(x, bf16)
expand_1: bf16[8, 4] = aten.expand(to_3, [8, 4])
neg: bf16[8, 4] = aten.neg(expand_1)
exp: bf16[8, 4] = aten.exp(expand_1)
return (neg, exp)""",
    )
    assert_bitwise_equal(with_inputs(expanded()), expanded(), MERGE(expanded()))


def casts(graph_module: GraphModule) -> int:
    return format_graph(graph_module).count("to.dtype")


def test_narrowing_and_widening_stays() -> None:
    sketch = Sketch()
    low = sketch.call(aten.to.dtype, sketch.input("x", 4), BF16)
    before = sketch.returns(sketch.call(aten.exp.default, sketch.call(aten.to.dtype, low, FP32)))
    assert not diff_graphs(before, MERGE(before))


def test_widening_between_two_casts_goes() -> None:
    sketch = Sketch()
    wide = sketch.call(aten.to.dtype, sketch.input("x", 4, dtype=BF16), FP32)
    before = sketch.returns(sketch.call(aten.neg.default, sketch.call(aten.to.dtype, wide, torch.float16)))
    assert casts(MERGE(before)) == 1
    assert_bitwise_equal(with_inputs(before), before, MERGE(before))


def test_one_cast_for_views_of_one_value() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 6)
    low = [sketch.call(aten.to.dtype, sketch.call(aten.slice.Tensor, x, 1, at, at + 3), BF16) for at in (0, 3)]
    low.append(sketch.call(aten.to.dtype, sketch.call(aten.t.default, x), BF16))
    before = sketch.returns(*(sketch.call(aten.neg.default, item) for item in low))
    assert casts(MERGE(before)) == 1
    assert_bitwise_equal(with_inputs(before), before, MERGE(before))


def test_rows_are_cast_not_the_table() -> None:
    sketch = Sketch()
    table, index = sketch.input("table", 100, 4), sketch.constant("index", torch.tensor([1, 5]))
    rows = sketch.call(aten.embedding.default, sketch.call(aten.to.dtype, table, BF16), index)
    before = sketch.returns(sketch.call(aten.neg.default, rows))
    after = MERGE(before)
    (cast,) = (node for node in after.graph.nodes if node.target is aten.to.dtype)
    assert tuple(cast.meta["val"].shape) == (2, 4)
    assert_bitwise_equal(with_inputs(before), before, after)


def test_reads_around_a_write_keep_their_casts() -> None:
    sketch = Sketch()
    x = sketch.call(aten.neg.default, sketch.input("x", 4))
    first = sketch.call(aten.to.dtype, x, BF16)
    sketch.call(aten.add_.Tensor, x, 1.0)
    second = sketch.call(aten.to.dtype, x, BF16)
    before = sketch.returns(sketch.call(aten.sub.Tensor, first, second))
    assert not diff_graphs(before, MergeCasts()(before))


def test_the_casts_are_gone_through_as_often_for_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def counting(graph: Graph) -> list[Node]:
        times[-1] += 1
        return casts_of(graph)

    casts_of = merge_casts._casts
    monkeypatch.setattr(merge_casts, "_casts", counting)
    for blocks in (2, 9):
        sketch = Sketch()
        x = sketch.input("x", 1, 4)
        for _ in range(blocks):
            low = sketch.call(aten.to.dtype, sketch.call(aten.expand.default, x, [8, 4]), BF16)
            row = sketch.call(aten.slice.Tensor, sketch.call(aten.to.dtype, sketch.call(aten.neg.default, low), FP32))
            x = sketch.call(aten.slice.Tensor, sketch.call(aten.exp.default, row), 0, 0, 1)
        times.append(0)
        before = sketch.returns(x)
        assert casts(MERGE(before)) >= blocks
        assert_bitwise_equal(with_inputs(before), before, MERGE(before))
    assert times[0] == times[1]


def test_casts_of_whole_numbers_stay() -> None:
    sketch = Sketch()
    wide = sketch.call(aten.to.dtype, sketch.input("x", 4, dtype=torch.int64), FP32)
    before = sketch.returns(sketch.call(aten.to.dtype, wide, BF16))
    assert not diff_graphs(before, MergeCasts()(before))


def test_symbolic_sizes_end() -> None:
    from tests.passes.capture import dynamic_mlp

    assert not diff_graphs(dynamic_mlp().graph_module, MergeCasts()(dynamic_mlp().graph_module))


def fused(read: Callable[[Sketch, Node], Node]) -> GraphModule:
    """Widens a part of a fused projection, which is not contiguous, and narrows it again into memory that is."""
    sketch = Sketch()
    part = sketch.call(aten.select.int, sketch.input("x", 4, 3, 6, dtype=BF16), 1, 0)
    low = sketch.call(aten.to.dtype, sketch.call(aten.to.dtype, part, FP32), BF16)
    return sketch.returns(read(sketch, low))


def test_what_reads_a_narrowed_value_in_other_memory_has_its_strides() -> None:
    def halves(sketch: Sketch, low: Node) -> Node:
        half = sketch.call(aten.slice.Tensor, low, 1, 0, 3)
        return sketch.call(aten.cat.default, [sketch.call(aten.neg.default, half), half], 1)

    before = fused(halves)
    assert casts(MERGE(before)) == 0
    assert_bitwise_equal(with_inputs(before), before, MERGE(before))


@pytest.mark.parametrize("read", [lambda sketch, low: sketch.call(aten.view.default, low, [24]), lambda _, low: low])
def test_a_cast_to_contiguous_memory_stays_for_a_view_and_for_the_caller(read: Any) -> None:
    before = fused(read)
    assert casts(MERGE(before)) == 2
    assert_bitwise_equal(with_inputs(before), before, MERGE(before))


def test_a_cast_of_an_expanded_value_stays_where_a_view_needs_it() -> None:
    sketch = Sketch()
    low = sketch.call(aten.to.dtype, sketch.call(aten.expand.default, sketch.input("x", 1, 4), [8, 4]), BF16)
    before = sketch.returns(sketch.call(aten.view.default, low, [32]))
    assert not diff_graphs(before, MERGE(before))


def test_a_cast_stays_behind_calls_that_pick_elements() -> None:
    """Before them, the gradient of an element that is picked many times would be summed in 16 bits."""
    sketch = Sketch()
    table, numbers = sketch.input("table", 8, 4), sketch.input("numbers", 64, dtype=torch.int64)
    picked = sketch.call(aten.embedding.default, table, numbers)
    before = sketch.returns(sketch.call(aten.neg.default, sketch.call(aten.to.dtype, picked, BF16)))
    assert not diff_graphs(before, MERGE(before))
