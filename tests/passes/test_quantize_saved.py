import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule, Node

from passes import NarrowSaved, PassError, format_graph
from passes.ops.fp8_formats import E4M3, tile_of
from passes.ops.fp8_ops import DEQUANTIZE, MATMUL, QUANTIZE
from tests.passes.capture import Sketch, aten, run, with_inputs
from tests.passes.operators import norm_error

BF16 = torch.bfloat16


def product(*, copied: bool = False, shape: tuple[int, ...] = (2, 4, 256)) -> GraphModule:
    """exp(x) times a gradient; `copied`: the forward has an 8-bit copy of exp(x)."""
    sketch = Sketch()
    x = sketch.input("primals_1", *shape, dtype=BF16)
    tangent = sketch.input("tangents_1", *shape, dtype=BF16)
    exp = sketch.call(aten.exp.default, x)
    results = [exp]
    if copied:
        copy = sketch.call(QUANTIZE, sketch.call(aten.view.default, exp, [-1, shape[-1]]), E4M3)
        results += [sketch.call(operator.getitem, copy, index) for index in (0, 1)]
    return sketch.returns(*results, sketch.call(aten.mul.Tensor, tangent, exp))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(NarrowSaved(("exp",), E4M3)(product())),
        """\
input primals_1: bf16[2, 4, 256]
input tangents_1: bf16[2, 4, 256]
exp: bf16[2, 4, 256] = aten.exp(primals_1)
view: bf16[8, 256] = aten.view(exp, [-1, 256])
fp8_quantize: (f8_e4m3fn[8, 256], f32[8, 2]) = memopt.fp8_quantize(view, f8_e4m3fn, '1x128')
getitem: f8_e4m3fn[8, 256] = fp8_quantize[0]
getitem_1: f32[8, 2] = fp8_quantize[1]
fp8_dequantize: bf16[8, 256] = memopt.fp8_dequantize(getitem, getitem_1, bf16)
view_1: bf16[2, 4, 256] = aten.view(fp8_dequantize, [2, 4, 256])
mul: bf16[2, 4, 256] = aten.mul.Tensor(tangents_1, view_1)
return (exp, mul)""",
    )


def test_a_copy_that_is_there_is_taken() -> None:
    assert_expected_inline(
        format_graph(NarrowSaved(("exp",), E4M3)(product(copied=True))),
        """\
input primals_1: bf16[2, 4, 256]
input tangents_1: bf16[2, 4, 256]
exp: bf16[2, 4, 256] = aten.exp(primals_1)
view: bf16[8, 256] = aten.view(exp, [-1, 256])
fp8_quantize: (f8_e4m3fn[8, 256], f32[]) = memopt.fp8_quantize(view, f8_e4m3fn)
getitem: f8_e4m3fn[8, 256] = fp8_quantize[0]
getitem_1: f32[] = fp8_quantize[1]
fp8_dequantize: bf16[8, 256] = memopt.fp8_dequantize(getitem, getitem_1, bf16)
view_1: bf16[2, 4, 256] = aten.view(fp8_dequantize, [2, 4, 256])
mul: bf16[2, 4, 256] = aten.mul.Tensor(tangents_1, view_1)
return (exp, getitem, getitem_1, mul)""",
    )


def test_of_two_copies_the_one_is_taken_that_is_kept_anyway() -> None:
    """By tiles there is one for the forward's product and one for the backward's."""
    sketch = Sketch()
    x, tangent = (sketch.input(name, 128, 256, dtype=BF16) for name in ("primals_1", "tangents_1"))
    exp = sketch.call(aten.exp.default, x)

    def copy(value: Node, tile: str) -> list[Node]:
        narrow = sketch.call(QUANTIZE, value, E4M3, tile)
        return [sketch.call(operator.getitem, narrow, index) for index in (0, 1)]

    product = sketch.call(DEQUANTIZE, *copy(exp, "1x128"), BF16)
    late = sketch.call(MATMUL, *copy(tangent, "128x1"), *copy(exp, "128x1"), None, True, False, BF16)
    after = NarrowSaved(("exp",), E4M3)(sketch.returns(exp, product, late, sketch.call(aten.mul.Tensor, tangent, exp)))
    (mul,) = after.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    values, scale = mul.args[1].args[:2]
    assert tile_of(values.meta["val"], scale.meta["val"]) == "128x1"


def test_what_is_not_named_or_not_read_later_stays() -> None:
    before = product()
    assert format_graph(NarrowSaved((), E4M3)(before)) == format_graph(before)
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", 8, 4, dtype=BF16), sketch.input("tangents_1", 8, 4, dtype=BF16)
    alone = sketch.returns(sketch.call(aten.exp.default, x), sketch.call(aten.exp.default, tangent))
    assert format_graph(NarrowSaved(("exp",), E4M3)(alone)) == format_graph(alone)


@pytest.mark.parametrize("shape", [(8, 256), (2, 4, 256)])
def test_the_forward_keeps_its_bits_and_the_backward_is_near(shape: tuple[int, ...]) -> None:
    captured = with_inputs(product(shape=shape))
    after = NarrowSaved(("exp",), E4M3)(captured.graph_module)
    (exp, gradient, *_), (found, narrow, *_) = run(captured, captured.graph_module), run(captured, after)
    assert torch.equal(found, exp)
    assert 0 < norm_error(narrow, gradient) < 0.04


def test_inputs_and_unknown_names_are_refused() -> None:
    with pytest.raises(PassError, match="this value is an input of the graph, or no contiguous tensor"):
        NarrowSaved(("primals_1",), E4M3)(product())
    with pytest.raises(PassError, match="there is no such node"):
        NarrowSaved(("nothing",), E4M3)(product())
