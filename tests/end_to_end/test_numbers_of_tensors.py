"""Inputs that hold one number, which the forward reads as a tensor or asks for by `item()`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt

EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "optimizer": None}
READERS = {
    "tensor": lambda hidden, number: hidden * number,
    "item": lambda hidden, number: hidden * number.item(),
    "floor": lambda hidden, number: hidden * (number.item() // 2),
    "full": lambda hidden, number: hidden * torch.full((8,), number.item(), dtype=hidden.dtype),
}


class Reads(nn.Module):
    def __init__(self, reader: str) -> None:
        super().__init__()
        self.layer, self.reader = nn.Linear(8, 8), reader

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        if self.reader == "alpha":
            return torch.add(x, hidden, alpha=number.item()).sin().sum()
        return READERS[self.reader](hidden, number).sin().sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("reader", READERS)
def test_each_batch_is_trained_with_its_own_number(reader: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Reads(reader), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, example_inputs=(x, torch.tensor(2, dtype=dtype)), **EXACT)
    for value in (2, 3, 7):
        number = torch.tensor(value, dtype=dtype)
        for trained in (model, plain):
            trained.zero_grad()
            trained(x, number).backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_number_whose_value_an_operator_needs_is_a_constant_of_each_plan(ahead: bool) -> None:
    torch.manual_seed(0)
    model, x = Reads("alpha"), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    example = (x, torch.tensor(2.0, dtype=torch.float64)) if ahead else None
    memopt.optimize(model, 1.0, example_inputs=example, **EXACT)
    for value in (2.0, 3.0, 7.5, 2.0):
        number = torch.tensor(value, dtype=torch.float64)
        for trained in (model, plain):
            trained.zero_grad()
            trained(x, number).backward()
        assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)  # type: ignore[arg-type]
