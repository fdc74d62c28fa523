"""The walk of `RewritePattern`: matches as it comes to a call, replaces it, and lets go of what only that has read."""

import dataclasses
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule, Node

from passes import PassError, RewritePattern, diff_graphs, format_graph, new_call
from passes.graphs.node_facts import module_path
from tests.passes.capture import Sketch, assert_bitwise_equal, aten, with_inputs


@dataclasses.dataclass(frozen=True)
class SquareAsProduct(RewritePattern[Any]):
    def match(self, node: Node) -> Any:
        return node.args[0] if node.target is aten.pow.Tensor_Scalar and node.args[1] == 2 else None

    def replace(self, node: Node, found: Any) -> Node:
        return new_call(node, aten.mul.Tensor, found, found)


@dataclasses.dataclass(frozen=True)
class DropNegTwice(RewritePattern[bool]):
    """Its `match` says no more than yes or no."""

    def match(self, node: Node) -> bool:
        return [source.target for source in (node, *node.all_input_nodes)] == [aten.neg.default] * 2

    def replace(self, node: Node, found: bool) -> Node:
        return node.all_input_nodes[0].all_input_nodes[0]


def squares() -> GraphModule:
    sketch = Sketch()
    x = sketch.input("x", 4)
    inner = sketch.call(aten.pow.Tensor_Scalar, x, 2)
    inner.meta["nn_module_stack"] = {"": ("square", torch.nn.Identity)}
    return sketch.returns(sketch.call(aten.pow.Tensor_Scalar, inner, 2))


def test_golden_where_one_match_reads_another() -> None:
    after = SquareAsProduct()(squares())
    assert_expected_inline(
        format_graph(after),
        """\
input x: f32[4]
mul: f32[4] = aten.mul.Tensor(x, x)
mul_1: f32[4] = aten.mul.Tensor(mul, mul)
return (mul_1,)""",
    )
    products = after.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert [module_path(node) for node in products] == ["square", ""]
    assert_bitwise_equal(with_inputs(squares()), squares(), after)


def test_what_only_the_replaced_call_has_read_goes_with_it() -> None:
    sketch = Sketch()
    node = sketch.input("x", 4)
    for _ in range(3):
        node = sketch.call(aten.neg.default, node)
    assert_expected_inline(
        format_graph(DropNegTwice()(sketch.returns(node))),
        """\
input x: f32[4]
neg_2: f32[4] = aten.neg(x)
return (neg_2,)""",
    )


def test_a_graph_without_the_pattern_stays() -> None:
    assert not diff_graphs(squares(), DropNegTwice()(squares()))


def test_a_replacement_that_is_none_is_refused() -> None:
    class Forgets(SquareAsProduct):
        def replace(self, node: Node, found: Any) -> Node:
            return None  # type: ignore[return-value]

    with pytest.raises(
        PassError, match="Forgets: node pow_1: replace returned NoneType for this node; return the node that"
    ):
        Forgets()(squares())


def test_a_replacement_of_another_type_is_refused() -> None:
    class Narrows(SquareAsProduct):
        def replace(self, node: Node, found: Any) -> Node:
            return new_call(node, aten._to_copy.default, found, dtype=torch.bfloat16)

    with pytest.raises(PassError, match="Narrows: node output: output 0 changed from f32"):
        Narrows()(squares())
