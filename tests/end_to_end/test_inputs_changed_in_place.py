"""The caller changes an input in place between the forward and its backward, which eager mode need not read again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB

EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


class Features(nn.Module):
    """Reads its input by an operator that needs no gradient: what it gives is saved, and cheaply computed once more
    where the wide layer leaves no room for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(512, 8), nn.ReLU(), nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images.sin())


def step(model: nn.Module, change: bool) -> list[torch.Tensor]:
    """The gradients of a step."""
    model.zero_grad()
    torch.manual_seed(1)
    images = torch.rand(1024, 512)
    outputs = model(images)
    if change:
        images.div_(255)
    outputs.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_a_changed_input_is_not_taken_for_the_first_one() -> None:
    plain = Features()
    expected = step(plain, change=True)
    with memopt.measure_peak("cpu") as peak:
        step(plain, change=False)
    refused = []
    for share in (0.9, 0.8, 0.7, 0.6):
        planned = memopt.optimize(Features(), share * peak.bytes / GIB, **EXACT)
        try:
            gradients = step(planned, change=True)
        except memopt.BudgetError:
            continue
        except RuntimeError as error:
            refused.append(str(error))
        else:
            assert all(map(torch.equal, gradients, expected))
    assert refused, "no plan reads the input again"
    assert all("FloatTensor [1024, 512], has been modified by an inplace operation" in words for words in refused)


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_an_input_may_be_changed_after_the_backward(share: float) -> None:
    plain = Features()
    expected = step(plain, change=False)
    with memopt.measure_peak("cpu") as peak:
        step(plain, change=False)
    planned = memopt.optimize(Features(), share * peak.bytes / GIB, **EXACT)
    assert all(map(torch.equal, step(planned, change=False), expected))
