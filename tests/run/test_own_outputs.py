"""A model whose forward breaks is called with its own outputs: dry runs leave the graphs of earlier forwards alone."""

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt

pytestmark = pytest.mark.plans_always


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        torch._dynamo.graph_break()
        return hidden * 2


@pytest.mark.parametrize("first", [1, 3])
def test_several_calls_through_time(first: int) -> None:
    plain, x = Cell(), torch.randn(5, 8)
    ours = memopt.optimize(copy.deepcopy(plain), 1, optimizer=None, precision="fp32", allow={"recompute", "reinplace"})
    for times in (first, 2, 3):
        for model in (plain, ours):
            hidden = x
            for _ in range(times):
                hidden = model(hidden)
            hidden.square().mean().backward()
    assert torch.equal(plain.body.weight.grad, ours.body.weight.grad)
