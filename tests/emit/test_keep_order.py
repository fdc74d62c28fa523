from __future__ import annotations

import torch
from torch.fx import GraphModule

from memopt.emit.inductor import keep_products_early
from tests.passes.capture import Sketch, aten


def graph(kernels_between: int) -> GraphModule:
    sketch = Sketch()
    a, b, c = sketch.input("a", 4, 4), sketch.input("b", 4, 4), sketch.input("c", 4, 4)
    product = sketch.call(aten.mm.default, a, b)
    other = c
    for _ in range(kernels_between):
        other = sketch.call(aten.mm.default, other, b)
    return sketch.returns(sketch.call(aten.add.Tensor, product, sketch.call(aten.relu.default, other)))


def test_an_add_long_after_its_product_reads_it_through_views() -> None:
    module = graph(2)
    keep_products_early(module)
    (add,) = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert add.args[0].target is aten.permute.default
    inputs = [torch.randn(4, 4) for _ in range(3)]
    assert torch.equal(module(*inputs)[0], graph(2)(*inputs)[0])
    assert add.args[0].meta["val"].shape == (4, 4)


def test_an_add_right_after_its_product_is_unchanged() -> None:
    module = graph(0)
    keep_products_early(module)
    assert not module.graph.find_nodes(op="call_function", target=aten.permute.default)
