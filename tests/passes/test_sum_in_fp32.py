import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import SumInFp32, diff_graphs, format_graph
from tests.passes.capture import Sketch, aten

BF16, FP32 = torch.bfloat16, torch.float32


def bias_gradient(*, read_twice: bool = False) -> GraphModule:
    sketch = Sketch()
    x = sketch.input("x", 16, 4, dtype=BF16)
    summed = sketch.call(aten.sum.dim_IntList, x, [0], True)
    view = sketch.call(aten.view.default, summed, [4])
    return sketch.returns(sketch.call(aten._to_copy.default, view, dtype=FP32), summed if read_twice else None)


def test_golden() -> None:
    assert_expected_inline(
        format_graph(SumInFp32()(bias_gradient())),
        """\
input x: bf16[16, 4]
sum_1: f32[1, 4] = aten.sum.dim_IntList(x, [0], True, dtype=f32)
view: f32[4] = aten.view(sum_1, [4])
return (view, None)""",
    )


def test_a_sum_that_is_read_in_16_bits_too_stays() -> None:
    assert not diff_graphs(bias_gradient(read_twice=True), SumInFp32()(bias_gradient(read_twice=True)))


def test_the_sum_is_rounded_no_more() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 4, dtype=BF16)
    (found, _) = SumInFp32()(bias_gradient())(x)
    assert torch.allclose(found.double(), x.double().sum(0), rtol=1e-6, atol=1e-6)
    (rounded, _) = bias_gradient()(x)
    assert not torch.equal(found, rounded)
