"""The pass in `examples/custom_pass.py`: what it does to GPT-2's activation."""

import torch
from expecttest import assert_expected_inline
from torch import nn
from transformers.activations import NewGELUActivation

from examples.custom_pass import TanhAsSigmoid
from passes import diff_graphs, format_graph
from tests.passes.operators import assert_same_gradients, capture_operators


class Loss(nn.Module):
    """An activation behind a linear layer, in a loss."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 8), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(x)).square().sum()


def test_golden_on_the_activation_of_gpt2() -> None:
    captured = capture_operators(Loss(NewGELUActivation()), torch.randn(2, 4))
    after = TanhAsSigmoid()(captured.graph_module)
    text = format_graph(after)
    assert_expected_inline(
        text[text.index("pow_1") : text.index("\nsquare")],
        """\
pow_1: f32[2, 8] = aten.pow.Tensor_Scalar(linear, 3.0)
mul_1: f32[2, 8] = aten.mul.Tensor(pow_1, 0.044715)
add: f32[2, 8] = aten.add.Tensor(linear, mul_1)
mul_2: f32[2, 8] = aten.mul.Tensor(add, 0.7978845608028654)
mul_4: f32[2, 8] = aten.mul.Tensor(mul_2, 2.0)
sigmoid: f32[2, 8] = aten.sigmoid(mul_4)
mul_5: f32[2, 8] = aten.mul.Tensor(linear, sigmoid)""",
    )
    assert_same_gradients(captured.graph_module, after, captured.inputs)


def test_another_activation_stays() -> None:
    captured = capture_operators(Loss(nn.GELU(approximate="tanh")), torch.randn(2, 4))
    assert not diff_graphs(captured.graph_module, TanhAsSigmoid()(captured.graph_module))
