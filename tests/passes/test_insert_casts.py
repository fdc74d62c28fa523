import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import InsertCasts, diff_graphs, format_graph
from tests.passes.capture import Sketch, aten

BF16, FP32 = torch.bfloat16, torch.float32


def layer() -> GraphModule:
    sketch = Sketch()
    x, weight = sketch.input("x", 4, 8), sketch.input("weight", 8, 8)
    linear = sketch.call(aten.linear.default, x, weight)
    turned = sketch.call(aten.t.default, linear)
    return sketch.returns(sketch.call(aten.exp.default, turned))


def test_golden() -> None:
    assert_expected_inline(
        format_graph(InsertCasts({"linear": BF16, "exp": FP32})(layer())),
        """\
input x: f32[4, 8]
input weight: f32[8, 8]
to: bf16[4, 8] = aten.to.dtype(x, bf16)
to_1: bf16[8, 8] = aten.to.dtype(weight, bf16)
linear: bf16[4, 8] = aten.linear(to, to_1)
t: bf16[8, 4] = aten.t(linear)
to_2: f32[8, 4] = aten.to.dtype(t, f32)
exp: f32[8, 4] = aten.exp(to_2)
return (exp,)""",
    )


def test_nothing_assigned_nothing_done() -> None:
    assert not diff_graphs(layer(), InsertCasts({})(layer()))


def test_an_operator_without_assignment_gets_what_it_got() -> None:
    after = InsertCasts({"linear": BF16})(layer())
    assert after.graph.output_node().all_input_nodes[0].meta["val"].dtype == FP32
    assert [node.meta["val"].dtype for node in after.graph.nodes if node.name == "t"] == [BF16]


@pytest.mark.parametrize("dtypes", [None, (None, None), (FP32, None), (FP32, FP32), (torch.float64, BF16)])
def test_outputs(dtypes: tuple[torch.dtype | None, ...] | None) -> None:
    layers = layer()
    (exp,) = layers.graph.output_node().args[0]
    layers.graph.output_node().args = ((exp, exp),)
    after = InsertCasts({"linear": BF16, "exp": BF16}, outputs=dtypes)(layers)
    found = [node.meta["val"].dtype for node in after.graph.output_node().args[0]]
    assert found == [dtype or BF16 for dtype in dtypes or (FP32, FP32)]


def test_numbers_and_gradients_equal_the_hand_cast_ones() -> None:
    after = InsertCasts({"linear": BF16, "exp": FP32})(layer())
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    (found,) = after(x, weight)
    expected = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()).t().float().exp()
    assert torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(found_one.sum(), (x, weight)) for found_one in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == FP32
        assert torch.equal(mine, other)


@pytest.mark.parametrize("low", [BF16, torch.float16])
def test_masks_stay_finite(low: torch.dtype) -> None:
    sketch = Sketch()
    scores, seen = sketch.input("scores", 2, 3, 3), sketch.input("seen", 3, 3, dtype=torch.bool)
    zeros = sketch.call(aten.zeros.default, [])
    mask = sketch.call(aten.where.ScalarOther, seen, zeros, torch.finfo(FP32).min)
    before = sketch.returns(sketch.call(aten.add.Tensor, scores, mask), mask)
    after = InsertCasts({"add": low}, outputs=(None, None))(before)
    masked, _ = after(torch.zeros(2, 3, 3), torch.zeros(3, 3, dtype=torch.bool))
    assert masked.dtype == low
    assert torch.isfinite(masked).all()


def test_a_sum_reads_16_bits_and_gives_fp32_without_a_cast() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, dtype=BF16)
    after = InsertCasts({"sum_1": FP32}, outputs=(None,))(sketch.returns(sketch.call(aten.sum.default, x)))
    assert "to.dtype" not in format_graph(after)
    (found,) = after(torch.full((4,), 0.1, dtype=BF16))
    assert found.dtype == FP32


def test_batch_norm_keeps_its_statistics() -> None:
    sketch = Sketch()
    image = sketch.input("image", 2, 3, 4, 4)
    rest = [sketch.input(name, 3) for name in ("weight", "bias", "mean", "variance")]
    norm = sketch.call(aten.batch_norm.default, image, *rest, True, 0.1, 1e-5, False)
    after = InsertCasts({"batch_norm": BF16}, outputs=(None,))(sketch.returns(norm))
    assert format_graph(after).count("to.dtype") == 1


def test_what_is_written_to_is_never_cast() -> None:
    sketch = Sketch()
    total, part = sketch.input("total", 4), sketch.input("part", 4)
    low = sketch.call(aten.neg.default, part)
    sketch.call(aten.add_.Tensor, total, low)
    after = InsertCasts({"neg": BF16, "add_": BF16}, outputs=(None,))(sketch.returns(total))
    held = torch.zeros(4)
    after(held, torch.ones(4))
    assert held.tolist() == [-1.0] * 4


def test_repr_counts() -> None:
    assert repr(InsertCasts({"a": BF16, "b": BF16, "c": FP32})) == "InsertCasts(2 bfloat16, 1 float32)"
