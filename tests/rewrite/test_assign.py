from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import memopt
from memopt.capture.operators import Decision, OperatorGraph, Operators
from memopt.device.devices import hardware
from memopt.levers.precision import DecidePrecision, check_rules, precision_rewriting
from memopt.rewrite.dtypes import AssignPrecision, Rules, check_policy, low_dtype
from tests.passes.capture import Sketch, aten

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def norm_and_linear() -> GraphModule:
    """Llama's norm as it is captured in fp32, a linear, a residual, and the loss."""
    sketch = Sketch()
    x, scale, weight = sketch.input("x", 4, 8), sketch.input("scale", 8), sketch.input("weight", 8, 8)
    labels = sketch.input("labels", 4, dtype=torch.int64)
    first = sketch.call(aten.linear.default, x, weight)
    wide = sketch.call(aten.to.dtype, first, FP32)
    mean = sketch.call(aten.mean.dim, sketch.call(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    normed = sketch.call(aten.mul.Tensor, wide, sketch.call(aten.rsqrt.default, mean))
    back = sketch.call(aten.to.dtype, normed, FP32)
    scaled = sketch.call(aten.mul.Tensor, scale, back)
    added = sketch.call(aten.add.Tensor, first, sketch.call(aten.gelu.default, scaled))
    return sketch.returns(sketch.call(aten.cross_entropy_loss.default, added, labels))


def decided(low: torch.dtype, rules: Rules | None = None) -> Decision:
    return DecidePrecision(low, rules or Rules())(OperatorGraph(norm_and_linear(), frozenset()))


def test_reasons() -> None:
    plan = AssignPrecision(BF16)(norm_and_linear())
    assert plan.reasons == {
        "linear": "bf16: as under torch.autocast",
        "to": "fp32: the model casts to fp32",
        "pow_1": "fp32: as under torch.autocast",
        "mean": "fp32: it sums, or is made of operators that torch.autocast keeps in fp32",
        "rsqrt": "fp32: as under torch.autocast",
        "mul": "fp32: an operand is fp32",
        "to_1": "bf16: the model casts back",
        "mul_1": "bf16: elementwise, operands in 16 bits",
        "gelu": "bf16: elementwise, operands in 16 bits",
        "add": "bf16: elementwise, operands in 16 bits",
        "cross_entropy_loss": "fp32: it sums, or is made of operators that torch.autocast keeps in fp32",
    }


def test_fp32_is_no_pass_at_all() -> None:
    assert not precision_rewriting("fp32", hardware("h100"))
    assert not precision_rewriting({"default": "fp32", "linear": "fp32"}, hardware("h100"))


def test_the_pipeline_trains_masters() -> None:
    pipeline = decided(BF16).pipeline
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((4, 8), (8,), (8, 8))]
    (loss,) = pipeline(norm_and_linear())(*leaves, torch.tensor([0, 1, 2, 3]))
    (exact,) = norm_and_linear()(*leaves, torch.tensor([0, 1, 2, 3]))
    assert loss.dtype == FP32
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    for gradient in torch.autograd.grad(loss, leaves):
        assert gradient.dtype == FP32
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("t4", FP16), ("a100-80", BF16), ("h100", BF16), ("h200", BF16), ("rtx-3090", BF16), ("rtx-4090", BF16)],
)
def test_auto_by_device(name: str, dtype: torch.dtype) -> None:
    assert low_dtype("auto", hardware(name)) == dtype


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, BF16), (False, FP32)])
def test_auto_on_a_cpu(has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16}, raising=False)
    assert low_dtype("auto", hardware("cpu")) == dtype


def test_a_node_rule_beats_an_operator_rule() -> None:
    rules = Rules.of({"default": "bf16", "mul": "bf16", "gelu": "fp32", "mul_1": "fp32"})
    choices = AssignPrecision(BF16, rules)(norm_and_linear()).choices
    assert [choices[name].dtype for name in ("mul", "mul_1", "gelu", "add")] == [BF16, FP32, FP32, FP32]


def test_module_rules() -> None:
    graph_module = norm_and_linear()
    for node in graph_module.graph.nodes:
        if node.name == "linear":
            node.meta["nn_module_stack"] = {"0": ("L['self'].layers.0.mlp", torch.nn.Linear)}
    for pattern in ("layers.0.mlp", "layers", "layers.*.mlp", "layers.0"):
        plan = AssignPrecision(BF16, Rules.of({pattern: "fp32"}))(graph_module)
        assert plan.choices["linear"].dtype == FP32


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="unknown dtype 'f8' in precision"):
        check_policy({"linear": "f8"})
    with pytest.raises(ValueError, match=r"precision must be one of .*'auto', or a dict of rules, not 'half'"):
        check_policy("half")
    with pytest.raises(TypeError, match=r"precision must be a name, such as 'bf16', or a dict of dtypes .*, not 16"):
        check_policy(16)  # type: ignore[arg-type]


def test_rules_that_match_nothing() -> None:
    decision = decided(BF16, Rules.of({"lm_haed": "fp32", "gelu": "fp32", "default": "bf16"}))
    assert decision.unmatched == ("lm_haed",)
    here = Operators(decisions=(decision,))
    with pytest.raises(ValueError, match="'lm_haed' matches no operator, module or node of Linear"):
        check_rules(torch.nn.Linear(1, 1), [here])
    elsewhere = Operators(decisions=(decided(BF16, Rules.of({"gelu": "fp32"})),))
    check_rules(torch.nn.Linear(1, 1), [here, elsewhere])


def test_fp16_on_a_device_without_it() -> None:
    without = replace(hardware("t4"), flops={"float32": 8.1e12})
    with pytest.raises(ValueError, match="t4 does not compute in fp16; use 'auto'"):
        precision_rewriting("fp16", without)


class _Probability(nn.Module):
    """A probability from a large logit, as a loss gets it: outside of the model, or within."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 1), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.sigmoid(self.linear(x).squeeze(-1))
        if self.loss == "outside":
            return found
        if self.loss == "of the other class":
            return -(1 - found).clamp(min=0).log().mean()
        return nn.functional.binary_cross_entropy(found, torch.zeros_like(found))


@pytest.mark.plans_always
@pytest.mark.parametrize("loss", ["outside", "within", "of the other class"])
def test_a_probability_that_a_loss_reads_is_not_rounded_to_1(loss: str) -> None:
    """In 16 bits the probability of logits above 6 is 1, and its loss 100 or infinite."""
    torch.manual_seed(0)
    model, x = _Probability(loss), torch.randn(64, 8)
    with torch.no_grad():
        model.linear.bias.fill_(8.0)

    def found() -> torch.Tensor:
        result = model(x)
        return nn.functional.binary_cross_entropy(result, torch.zeros_like(result)) if loss == "outside" else result

    expected = found().item()
    memopt.optimize(model, 1, precision="bf16", optimizer=None)
    assert found().item() == pytest.approx(expected, rel=0.02)


def test_a_gate_stays_in_16_bits() -> None:
    sketch = Sketch()
    x, weight = sketch.input("x", 4, 8), sketch.input("weight", 8, 8)
    linear = sketch.call(aten.linear.default, x, weight)
    gate = sketch.call(aten.sigmoid.default, linear)
    gated = sketch.call(aten.mul.Tensor, linear, gate)
    module = sketch.returns(sketch.call(aten.linear.default, gated, weight))
    assert AssignPrecision(torch.bfloat16)(module).choices["sigmoid"].dtype == torch.bfloat16
