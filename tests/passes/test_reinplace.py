import contextlib
import operator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from passes import PassError, Reinplace, diff_graphs, find_reuses, format_graph, format_node
from tests.passes.capture import Captured, Sketch, assert_bitwise_equal, aten, dynamic_mlp, gpt2, resnet, with_inputs


def reused(graph_module: GraphModule) -> list[str]:
    return [f"{name}: over {operand}" for name, operand in find_reuses(graph_module)]


def test_golden() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 4, 4), sketch.input("weight", 4, 4)
    relu = sketch.call(aten.relu.default, sketch.call(aten.mm.default, x, weight))
    add = sketch.call(aten.add.Tensor, x, relu)
    view = sketch.call(aten.view.default, sketch.call(aten.mul.Tensor, add, weight), [2, 8])
    before = sketch.returns(sketch.call(aten.mul.Tensor, view, 3.0))
    after = Reinplace()(before)
    assert_expected_inline(
        format_graph(after),
        """\
input x: f32[4, 4]
input weight: f32[4, 4]
mm: f32[4, 4] = aten.mm(x, weight)
relu: f32[4, 4] = aten.relu_(mm)
add: f32[4, 4] = aten.add.out(x, relu, out=relu)
mul: f32[4, 4] = aten.mul_.Tensor(add, weight)
view: f32[2, 8] = aten.view(mul, [2, 8])
mul_1: f32[2, 8] = aten.mul_.Tensor(view, 3.0)
return (mul_1,)""",
    )
    assert_bitwise_equal(with_inputs(before), before, after)
    assert reused(before) == ["relu: over mm", "add: over relu", "mul: over add", "mul_1: over view"]
    assert not diff_graphs(after, Reinplace()(after))


def build(kind: str) -> GraphModule:
    """A graph in which nothing may be written over, for one reason each."""
    sketch = Sketch()
    x, y = sketch.input("x", 4, 4), sketch.input("y", 4, 4)
    if kind == "an input":
        return sketch.returns(sketch.call(aten.relu.default, x))
    mm = sketch.call(aten.mm.default, x, y)
    if kind == "read later":
        relu = sketch.call(aten.relu.default, mm)
        return sketch.returns(sketch.call(aten.mm.default, relu, mm))
    if kind == "returned":
        return sketch.returns(sketch.call(aten.relu.default, mm), mm)
    if kind == "a view of it is returned":
        return sketch.returns(sketch.call(aten.t.default, mm), sketch.call(aten.relu.default, mm))
    if kind == "a view of it is read later":
        row = sketch.call(aten.select.int, mm, 0, 0)
        return sketch.returns(sketch.call(aten.relu.default, mm), sketch.call(aten.sum.default, row))
    if kind == "its own transpose":
        return sketch.returns(sketch.call(aten.add.Tensor, mm, sketch.call(aten.t.default, mm)))
    if kind == "a part":
        return sketch.returns(sketch.call(aten.relu.default, sketch.call(aten.slice.Tensor, mm, 0, 0, 2)))
    if kind == "expanded":
        row = sketch.call(aten.sum.dim_IntList, mm, [0], True)
        return sketch.returns(sketch.call(aten.neg.default, sketch.call(aten.expand.default, row, [4, 4])))
    if kind == "broadcast":
        return sketch.returns(sketch.call(aten.add.Tensor, sketch.call(aten.sum.dim_IntList, mm, [0]), x))
    if kind == "another dtype":
        return sketch.returns(
            sketch.call(aten.add.Tensor, x, sketch.call(aten._to_copy.default, y, dtype=torch.float16))
        )
    if kind == "another layout":
        turned = sketch.call(aten.t.default, mm)
        return sketch.returns(sketch.call(aten.add.Tensor, x, turned))
    assert kind == "not known to be new"
    return sketch.returns(sketch.call(aten.relu.default, sketch.call(aten.cumsum.default, x, 0)))


KINDS = (
    "an input", "read later", "returned", "a view of it is returned", "a view of it is read later", "its own transpose",
    "a part", "expanded", "broadcast", "another dtype", "another layout", "not known to be new",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_left_alone(kind: str) -> None:
    before = build(kind)
    assert not reused(before)
    assert not diff_graphs(before, Reinplace()(before))


def test_an_operand_that_is_given_twice() -> None:
    sketch = Sketch()
    mm = sketch.call(aten.mm.default, sketch.input("x", 4, 4), sketch.input("y", 4, 4))
    before = sketch.returns(sketch.call(aten.mul.Tensor, mm, mm))
    assert reused(before) == ["mul: over mm"]
    assert_bitwise_equal(with_inputs(before), before, Reinplace()(before))


def test_two_evaluations_that_share_a_stored_value() -> None:
    """As in graphs of a schedule: one is dead, the other is not."""
    sketch = Sketch()
    x, y = sketch.input("x", 4, 4), sketch.input("y", 4, 4)
    first, again = (sketch.call(aten.mm.default, x, y) for _ in range(2))
    again.meta["val"] = first.meta["val"]
    before = sketch.returns(sketch.call(aten.relu.default, first), again)
    assert reused(before) == ["relu: over mm"]
    assert_bitwise_equal(with_inputs(before), before, Reinplace()(before))


def two_products() -> GraphModule:
    """relu(x @ y * (z @ u))."""
    sketch = Sketch()
    first = sketch.call(aten.mm.default, sketch.input("x", 4, 4), sketch.input("y", 4, 4))
    second = sketch.call(aten.mm.default, sketch.input("z", 4, 4), sketch.input("u", 4, 4))
    product = sketch.call(aten.mul.Tensor, first, second)
    return sketch.returns(sketch.call(aten.relu.default, product))


def test_among_others() -> None:
    """Only results of the named nodes are written over, and only by the named nodes."""
    graph = two_products()
    second, product = (node for node in graph.graph.nodes if node.name in ("mm_1", "mul"))
    assert reused(graph) == ["mul: over mm", "relu: over mul"]
    assert find_reuses(graph, {second, product}) == (("mul", "mm_1"),)


def test_those_that_are_named() -> None:
    before = two_products()
    after = Reinplace((("mul", "mm_1"),))(before)
    assert [format_node(node) for node in after.graph.nodes if node.name in ("mul", "relu")] == [
        "mul: f32[4, 4] = aten.mul.out(mm, mm_1, out=mm_1)",
        "relu: f32[4, 4] = aten.relu(mul)",
    ]
    assert_bitwise_equal(with_inputs(before), before, after)
    with pytest.raises(PassError, match="mul: it cannot write over x"):
        Reinplace((("mul", "x"),))(before)
    with pytest.raises(PassError, match="there is no such node"):
        Reinplace((("add", "mm"),))(before)


UNARY = (aten.relu.default, aten.neg.default, aten.tanh.default, aten.sin.default, aten.gelu.default)
BINARY = (aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.maximum.default, aten.mm.default)
BACKWARD = (aten.gelu_backward.default, aten.threshold_backward.default, aten.tanh_backward.default)
VIEWS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.t.default, ()),
    (aten.view.default, ([4, 4],)),
    (aten.view.default, ([2, 8],)),
    (aten.view.default, ([16],)),
    (aten.select.int, (0, 1)),
    (aten.slice.Tensor, (0, 1, 3)),
    (aten.expand.default, ([4, 4],)),
    (aten.alias.default, ()),
    (aten._unsafe_view.default, ([4, 4],)),
)


KINDS_OF_CALLS = ("unary", "binary", "binary", "view", "view", "backward", "turned", "where", "norm", "write")


class Calls:
    """Calls on a sketch that hypothesis draws."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.sketch = draw, Sketch()
        self.nodes = [self.sketch.input("x", 4, 4), self.sketch.input("y", 4, 4), self.sketch.input("row", 4)]

    def one_of(self, choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def pick(self) -> Node:
        """Late ones more often: chains are what the pass is for."""
        late = self.nodes[max(0, len(self.nodes) - 5) :]
        return self.one_of(late if self.draw(st.booleans()) else self.nodes)

    def add(self, target: Any, *args: Any) -> Node:
        self.nodes.append(self.sketch.call(target, *args))
        return self.nodes[-1]

    def add_one(self, kind: str) -> None:
        """Raises what the operator does where shapes do not go together."""
        one = self.pick()
        if kind == "unary":
            self.add(self.one_of(UNARY), one)
        elif kind == "binary":
            self.add(self.one_of(BINARY), one, self.pick())
        elif kind == "backward":
            target = self.one_of(BACKWARD)
            alike = [node for node in self.nodes if node.meta["val"].shape == one.meta["val"].shape]
            self.add(target, one, self.one_of(alike), *((0.0,) if "threshold" in str(target) else ()))
        elif kind == "view":
            target, options = self.one_of(VIEWS)
            self.add(target, one, *options)
        elif kind == "turned":
            turned = self.sketch.call(aten.t.default, one)
            self.add(self.one_of(BINARY), *self.draw(st.permutations([one, turned])))
        elif kind == "where":
            self.add(aten.where.self, self.sketch.call(aten.gt.Scalar, self.pick(), 0.0), one, self.pick())
        elif kind == "norm":
            pair = self.sketch.call(aten.native_layer_norm.default, one, [4], None, None, 1e-5)
            for place in range(2):
                self.add(operator.getitem, pair, place)
        else:
            self.sketch.call(aten.copy_.default, self.nodes[0], self.sketch.call(aten.clone.default, one))


@st.composite
def graphs(draw: Any) -> GraphModule:
    """Elementwise calls, products, views, pairs of results and writes to an input, of which some are returned."""
    calls = Calls(draw)
    for _ in range(draw(st.integers(3, 14))):
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            calls.add_one(calls.one_of(KINDS_OF_CALLS))
        for node in reversed(calls.sketch.graph.nodes):
            if "val" not in node.meta:
                calls.sketch.graph.erase_node(node)
    # Expanded values have no bits to compare.
    whole = [node for node in calls.nodes if 0 not in node.meta["val"].stride()]
    return calls.sketch.returns(whole[-1], *draw(st.lists(st.sampled_from(whole), max_size=3, unique=True)))


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_equal_bits_on_any_graph(before: GraphModule) -> None:
    """The results, and the inputs after the run, are bitwise the same."""
    assert_bitwise_equal(with_inputs(before), before, Reinplace()(before))


@pytest.mark.parametrize("model", [gpt2, resnet, dynamic_mlp])
def test_captured_models(model: Any) -> None:
    captured: Captured = model()
    after = Reinplace()(captured.graph_module)
    assert reused(captured.graph_module)
    assert_bitwise_equal(captured, captured.graph_module, after)
