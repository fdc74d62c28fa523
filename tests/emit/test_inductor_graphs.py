"""What is changed in a forward or backward before inductor compiles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from memopt.compat.inductor_lowering import hold, make_fallbacks_known
from memopt.emit.footprint import Half, footprint
from memopt.emit.inductor import hold_values, keep_products_early
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


def two_values(*, read_late: bool = True, again: bool = False) -> GraphModule:
    """A value computed from two products, read once at once and, with `read_late`, once more after two other products;
    with `again`, the two products are read late too."""
    sketch = Sketch()
    x, y = sketch.input("x", 64, 64), sketch.input("y", 64, 64)
    first, second = sketch.call(aten.mm.default, x, y), sketch.call(aten.mm.default, y, x)
    both = sketch.call(aten.mul.Tensor, first, second)
    early = sketch.call(aten.mm.default, sketch.call(aten.relu.default, both), y)
    other = sketch.call(aten.mm.default, early, x)
    late = sketch.call(aten.mul.Tensor, both if read_late else other, other)
    results = [sketch.call(aten.mm.default, late, y)]
    results += [sketch.call(aten.mul.Tensor, value, 3.0) for value in (first, second) if again]
    return sketch.returns(*results)


def held(module: GraphModule, *inputs: str) -> list[str]:
    hold_values(module, inputs)
    return [node.args[0].name for node in module.graph.find_nodes(op="call_function", target=hold)]


def test_a_value_that_is_read_late_is_held_in_place_of_its_arguments() -> None:
    module = two_values()
    assert held(module) == ["mul"]
    inputs = [torch.randn(64, 64) for _ in range(2)]
    assert torch.equal(module(*inputs)[0], two_values()(*inputs)[0])


@pytest.mark.parametrize("options", [{"read_late": False}, {"again": True}], ids=["read at once", "arguments stay"])
def test_a_value_is_not_held_where_its_arguments_would_live_no_longer(options: dict[str, bool]) -> None:
    assert held(two_values(**options)) == []


def test_a_value_of_inputs_that_nothing_frees_is_not_held() -> None:
    sketch = Sketch()
    x, y, z = (sketch.input(name, 64, 64) for name in "xyz")
    both = sketch.call(aten.add.Tensor, x, y)
    early = sketch.call(aten.mm.default, sketch.call(aten.relu.default, both), z)
    module = sketch.returns(early, sketch.call(aten.mul.Tensor, both, early))
    assert held(module, "x", "y") == []
    assert held(module) == ["add"]


def test_compiled_code_holds_the_value_alone() -> None:
    def peak(module: GraphModule) -> int:
        empty = Half("def call(args):\n    return ()\n", [])
        return footprint(compiled(module), empty, 1).forward_bytes

    module = two_values()
    before = peak(two_values())
    hold_values(module, ())
    assert peak(module) < before


def compiled(module: GraphModule) -> Half:
    """The code that inductor writes for a graph."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    make_fallbacks_known(module, is_backward=False)
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    fakes = [node.meta["val"] for node in placeholders]
    settings = torch._inductor.config.patch(force_disable_caches=True, allow_buffer_reuse=False)
    with tracing(TracingContext(fakes[0].fake_mode)), settings:
        code: Any = compile_fx_inner(module, fakes)
    return Half(code.source_code, placeholders)
