"""Values that a fusing compiler never holds, and what a graph costs without them."""

from __future__ import annotations

import operator

from torch.fx import GraphModule, Node

from memopt.device.storages import find_storages, fused_away, is_generated
from memopt.price.price import price
from memopt.price.priced_graph import GraphUse, NodePrice
from passes import ApplySchedule
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, with_inputs


def names(module: GraphModule) -> set[str]:
    return {node.name for node in fused_away(module.graph)}


def test_a_chain_between_kernels_is_computed_by_those_who_read_it() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 8, 8), sketch.input("weight", 8, 8)
    first = sketch.call(aten.mm.default, x, weight)
    scaled = sketch.call(aten.mul.Tensor, first, 0.5)
    active = sketch.call(aten.tanh.default, sketch.call(aten.view.default, scaled, [64]))
    product = sketch.call(aten.mm.default, sketch.call(aten.view.default, active, [8, 8]), weight)
    assert names(sketch.returns(product)) == {"mul"}, "tanh is read by a kernel that needs it held"


def test_what_both_halves_read_is_held_where_that_takes_less() -> None:
    sketch = Sketch()
    x, y, tangent = sketch.input("x", 8, 8), sketch.input("y", 8, 8), sketch.input("tangents_1", 8, 8)
    a, b = sketch.call(aten.mm.default, x, y), sketch.call(aten.mm.default, y, x)
    both = sketch.call(aten.add.Tensor, a, b)
    loss = sketch.call(aten.sum.default, both)
    backward = sketch.call(aten.mul.Tensor, tangent, both)
    gradient = sketch.call(aten.mm.default, backward, y)
    assert names(sketch.returns(loss, gradient)) == set()


def test_draws_dear_functions_and_buffers_that_change_are_left() -> None:
    sketch = Sketch()
    x, buffer = sketch.input("x", 8, 8), sketch.input("buffer", 8, 8)
    exp = sketch.call(aten.exp.default, x)
    sums = [sketch.call(aten.sum.dim_IntList, exp, [dim]) for dim in (0, 1)]
    moved = sketch.call(aten.mul.Tensor, buffer, 0.9)
    sketch.call(aten.copy_.default, buffer, moved)
    drawn = sketch.call(aten.bernoulli.p, x, 0.5)
    assert names(sketch.returns(*sums, sketch.call(aten.sum.default, drawn))) == set()


def test_prims_of_pooling_run_in_kernels_of_the_compiler() -> None:
    import torch._inductor.inductor_prims

    prims = torch.ops.prims
    sketch = Sketch()
    window = [3, 3], [2, 2], [1, 1], [1, 1]
    pooled = sketch.call(prims._low_memory_max_pool_with_offsets.default, sketch.input("x", 1, 2, 8, 8), *window, False)
    offsets = sketch.call(operator.getitem, pooled, 1)
    size, stride, padding, dilation = [3, 3], [8, 8], [2, 2], [1, 1]
    arguments = size, stride, padding, dilation, [1, 1]
    indices = sketch.call(prims._low_memory_max_pool_offsets_to_indices.default, offsets, *arguments)
    product = sketch.call(aten.mm.default, *[sketch.input(name, 8, 8) for name in "ab"])
    module = sketch.returns(sketch.call(operator.getitem, pooled, 0), indices, product)
    generated = {node.target for node in module.graph.nodes if is_generated(node)}
    assert generated == {pooled.target, indices.target}


def layer() -> tuple[GraphModule, list[Node]]:
    """A forward of a product, its square and a sum, and a backward that reads the square."""
    sketch = Sketch()
    x, weight, tangent = sketch.input("x", 8, 8), sketch.input("weight", 8, 8), sketch.input("tangents_1")
    product = sketch.call(aten.mm.default, x, weight)
    square = sketch.call(aten.mul.Tensor, product, product)
    loss = sketch.call(aten.sum.default, square)
    scaled = sketch.call(aten.mul.Tensor, square, tangent)
    gradient = sketch.call(aten.mm.default, sketch.call(aten.t.default, x), scaled)
    return sketch.returns(loss, gradient), [product, square]


def test_who_reads_such_a_value_reads_what_it_is_computed_from() -> None:
    module, (product, square) = layer()
    fused = fused_away(module.graph)
    found = find_storages(module.graph, fused)
    assert fused == {square}
    assert found.of[square] == found.of[product]
    priced = price(module, 1, lambda _: NodePrice(1.0, 0), GraphUse(fused=fused))
    assert [op.name for op in priced.problem.ops if op.seconds] == ["mm", "sum_1", "mul_1", "mm_1"]
    reads = {op.name: [priced.problem.storages[index].name for index in op.reads] for op in priced.problem.ops}
    assert reads["sum_1"] == ["mm"]
    assert reads["mul_1"] == ["mm", "tangents_1"]


def test_a_schedule_without_them_computes_the_same() -> None:
    module, _ = layer()
    scheduled = ApplySchedule(("mm", "sum_1", "mm", "mul_1", "mm_1"), 2, 1)(module)
    assert sum(node.target is aten.mul.Tensor for node in scheduled.graph.nodes) == 3
    assert_bitwise_equal(with_inputs(module), module, scheduled)
