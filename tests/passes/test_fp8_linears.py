import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule

from passes import Fp8Linears, PassError, find_fp8_linears, format_graph
from passes.ops.fp8_ops import FP8_LINEAR, SCALINGS
from tests.passes.capture import Sketch, aten
from tests.passes.operators import capture_operators, norm_error, outputs_and_gradients

BF16 = torch.bfloat16


def layers(rows: int = 32, inner: int = 16, columns: int = 48) -> GraphModule:
    """Two layers of one input, one as `addmm` calls it, with a weight that is cast."""
    sketch = Sketch()
    x = sketch.input("x", rows, inner, dtype=BF16)
    weight, turned = sketch.input("weight", columns, inner), sketch.input("turned", inner, 16, dtype=BF16)
    bias = sketch.input("bias", 16, dtype=BF16)
    linear = sketch.call(aten.linear.default, x, sketch.call(aten.to.dtype, weight, BF16))
    addmm = sketch.call(aten.addmm.default, bias, x, turned)
    return sketch.returns(linear, addmm)


def test_golden() -> None:
    assert_expected_inline(
        format_graph(Fp8Linears(frozenset({"linear", "addmm"}))(layers())),
        """\
input x: bf16[32, 16]
input weight: f32[48, 16]
input turned: bf16[16, 16]
input bias: bf16[16]
fp8_linear: bf16[32, 48] = memopt.fp8_linear(x, weight)
fp8_linear_1: bf16[32, 16] = memopt.fp8_linear(x, turned, bias, turned=True)
return (fp8_linear, fp8_linear_1)""",
    )


def test_golden_of_delayed_scaling() -> None:
    after = Fp8Linears(frozenset({"linear", "addmm"}), "delayed", "7/")(layers())
    text = format_graph(after).replace(", scaling", ",\n    scaling").split("bias: bf16[16]\n")[1]
    assert_expected_inline(
        text,
        """\
fp8_delayed_scale: f32[] = memopt.fp8_delayed_scale(x, f8_e4m3fn, '7//linear')
fp8_linear: bf16[32, 48] = memopt.fp8_linear(x, weight, None, fp8_delayed_scale,
    scaling='delayed', history='7//linear/gradient')
fp8_linear_1: bf16[32, 16] = memopt.fp8_linear(x, turned, bias, fp8_delayed_scale,
    scaling='delayed', history='7//addmm/gradient', turned=True)
return (fp8_linear, fp8_linear_1)""",
    )


@pytest.mark.parametrize("scaling", sorted(SCALINGS))
def test_one_layer_reads_the_result_of_another(scaling: str) -> None:
    """As the two matrices of a low-rank adapter do."""
    sketch = Sketch()
    x, down, up = (
        sketch.input(name, *shape, dtype=BF16)
        for name, *shape in (("x", 128, 128), ("down", 128, 128), ("up", 256, 128))
    )
    narrow = sketch.call(aten.linear.default, x, down)
    before = sketch.returns(sketch.call(aten.linear.default, narrow, up))
    after = Fp8Linears(frozenset({"linear", "linear_1"}), scaling, "7/")(before)
    first, second = after.graph.find_nodes(op="call_function", target=FP8_LINEAR)
    assert second.args[0] is first
    assert not after.graph.find_nodes(op="call_function", target=aten.linear.default)


def test_what_is_not_named_stays() -> None:
    before = layers()
    assert format_graph(Fp8Linears(frozenset())(before)) == format_graph(before)


def test_what_is_found() -> None:
    linear, addmm = find_fp8_linears(layers())
    assert (linear.name, linear.reads, linear.rows, linear.inner, linear.columns) == ("linear", "x", 32, 16, 48)
    assert (addmm.name, addmm.reads, addmm.rows, addmm.inner, addmm.columns) == ("addmm", "x", 32, 16, 16)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"rows": 33}, "its 33 rows are no multiple of 16"), ({"inner": 8}, "its 8 columns of its input are no multiple")],
)
def test_sizes_that_units_do_not_take_are_refused(sizes: dict[str, int], reason: str) -> None:
    before = layers(**sizes)
    assert find_fp8_linears(before)[0].reason.startswith(reason)
    with pytest.raises(PassError, match=reason):
        Fp8Linears(frozenset({"linear"}))(before)


def test_fp32_is_refused() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 32, 16), sketch.input("weight", 16, 16)
    before = sketch.returns(sketch.call(aten.linear.default, x, weight))
    with pytest.raises(PassError, match="it does not compute in 16 bits"):
        Fp8Linears(frozenset({"linear"}))(before)


def test_other_calls_and_scalings_are_refused() -> None:
    with pytest.raises(PassError, match="it is no linear layer"):
        Fp8Linears(frozenset({"to"}))(layers())
    with pytest.raises(ValueError, match="block, mx, not 'often'"):
        Fp8Linears(frozenset(), "often")


@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_near_the_plain_model(scaling: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)).to(BF16)
    captured = capture_operators(lambda x: model(x).float().square().mean(), torch.randn(4, 32, 128, dtype=BF16))
    names = frozenset(module.name for module in find_fp8_linears(captured.graph_module))
    after = Fp8Linears(names, scaling, "near/")(captured.graph_module)
    assert sum(node.target is FP8_LINEAR for node in after.graph.nodes) == 2
    (expected, *_), plain = outputs_and_gradients(captured.graph_module, captured.inputs)
    (found, *_), narrow = outputs_and_gradients(after, captured.inputs)
    assert norm_error(found, expected) < 0.02
    for one, other in zip(narrow, plain, strict=True):
        assert one is not None
        assert other is not None
        assert 0 < norm_error(one, other) < 0.12
