"""Operators whose bits a trace does not keep are named, and others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.capture.departures import departures
from tests.capture.recorded import recorded


class Calling(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.ones(4, 3)), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x * self.weight).sum()


def drawn(x: Tensor) -> Tensor:
    return torch.empty_like(x.t()).bernoulli_(0.5) * x.t()


def drawn_in_rows(x: Tensor) -> Tensor:
    return torch.empty_like(x).bernoulli_(0.5) * x


CALLS = [
    (lambda x: x.prod(1), "prod"),
    (torch.prod, "prod"),
    (drawn, "bernoulli_"),
    (drawn_in_rows, ""),
    (lambda x: x.masked_fill(x > 0, x.sum()), "masked_fill"),
    (lambda x: torch.masked_fill(x, x > 0, value=x.sum()), "masked_fill"),
    (lambda x: x.sin().masked_fill_(x > 0, x.sum()), "masked_fill"),
    (lambda x: x.masked_fill(x > 0, 0.0), ""),
    (torch.sin, ""),
]


@pytest.mark.parametrize(("call", "name"), CALLS)
def test_departures_have_a_note_each(call: Callable[[Tensor], Tensor], name: str) -> None:
    region = recorded(Calling(call).train(), torch.ones(4, 3))
    assert [note.split(" ")[0] for note in departures([region.graph_module])] == ([name] if name else [])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].pow(2).mean()


def test_a_plan_names_the_operator() -> None:
    plan = memopt.plan(Recurrent().train(), 1, (torch.ones(2, 3, 8),), optimizer=torch.optim.SGD, precision="fp32")
    assert any(note.startswith("lstm is not computed bit by bit") for note in plan.notes)
