import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import NarrowSaved, PassError, format_graph
from tests.passes.capture import Sketch, aten, gpt2, run

BF16 = torch.bfloat16


def norm() -> GraphModule:
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", 8, 4), sketch.input("tangents_1", 8, 4)
    tanh = sketch.call(aten.tanh.default, x)
    rounded = sketch.call(aten._to_copy.default, x, dtype=BF16)
    out = sketch.call(aten.exp.default, tanh)
    doubled = sketch.call(aten.mul.Scalar, sketch.call(aten.pow.Tensor_Scalar, tanh, 1.0), 2.0)
    return sketch.returns(
        out,
        rounded,
        sketch.call(aten.mul.Tensor, tangent, tanh),
        sketch.call(aten.mul.Tensor, tangent, doubled),
        sketch.call(aten._softmax_backward_data.default, tangent, tanh, -1, torch.float32),
    )


def test_golden() -> None:
    assert_expected_inline(
        format_graph(NarrowSaved(("tanh",), BF16)(norm())),
        """\
input primals_1: f32[8, 4]
input tangents_1: f32[8, 4]
tanh: f32[8, 4] = aten.tanh(primals_1)
narrow: bf16[8, 4] = aten._to_copy(tanh, dtype=bf16)
_to_copy: bf16[8, 4] = aten._to_copy(primals_1, dtype=bf16)
exp: f32[8, 4] = aten.exp(tanh)
pow_1: f32[8, 4] = aten.pow.Tensor_Scalar(tanh, 1.0)
mul: f32[8, 4] = aten.mul.Scalar(pow_1, 2.0)
mul_1: f32[8, 4] = aten.mul.Tensor(tangents_1, narrow)
mul_2: f32[8, 4] = aten.mul.Tensor(tangents_1, mul)
wide: f32[8, 4] = aten._to_copy(narrow, dtype=f32)
_softmax_backward_data: f32[8, 4] = aten._softmax_backward_data(tangents_1, wide, -1, f32)
return (exp, _to_copy, mul_1, mul_2, _softmax_backward_data)""",
    )


def test_a_rounded_copy_that_is_there_is_taken() -> None:
    sketch = Sketch()
    x, tangent = sketch.input("primals_1", 8, 4), sketch.input("tangents_1", 8, 4)
    tanh = sketch.call(aten.tanh.default, x)
    rounded = sketch.call(aten._to_copy.default, tanh, dtype=BF16)
    after = NarrowSaved(("tanh",), BF16)(sketch.returns(rounded, sketch.call(aten.mul.Tensor, tangent, tanh)))
    assert [str(node.target) for node in after.graph.nodes].count("aten._to_copy.default") == 1
    assert not any(node.name.startswith("narrow") for node in after.graph.nodes)


def test_the_forward_keeps_its_bits_and_the_backward_is_near() -> None:
    captured = gpt2()
    wide = [
        node.name
        for node in captured.graph_module.graph.nodes
        if str(node.target) in ("aten.add.Tensor", "aten.tanh.default") and node.meta["val"].numel() > 100
    ]
    after = NarrowSaved(tuple(wide), BF16)(captured.graph_module)
    before, now = run(captured, captured.graph_module), run(captured, after)
    for one, other in zip(before[: captured.forward_outputs], now[: captured.forward_outputs], strict=True):
        assert torch.equal(one, other)
    changed = 0
    for one, other in zip(before[captured.forward_outputs :], now[captured.forward_outputs :], strict=True):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            assert (one - other).norm() <= 0.02 * one.norm()
            changed += not torch.equal(one, other)
    assert changed


def test_an_unknown_value() -> None:
    with pytest.raises(PassError, match="there is no such node"):
        NarrowSaved(("none",), BF16)(norm())
