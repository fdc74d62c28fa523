"""One tensor at a time by an optimiser's own code, and the pieces of large ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from memopt.optimizers import parameterwise
from memopt.optimizers.parameterwise import Slice, flat, goes_in_pieces, is_dense, like, pieces_of, step_one


def test_a_step_by_a_groups_options_leaves_the_optimizer_as_it_was() -> None:
    own = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([own], lr=1.0)
    tensor = torch.zeros(2)
    tensor.grad = torch.ones(2)
    state = step_one(optimizer, {**optimizer.param_groups[0], "lr": 0.5, "momentum": 0.9}, tensor, {})
    assert tensor.tolist() == [-0.5, -0.5]
    assert state["momentum_buffer"].tolist() == [1.0, 1.0]
    assert (optimizer.param_groups[0]["params"], dict(optimizer.state)) == ([own], {})


class Counting(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["weight_decay"] += 1
        return super().step(closure)


def test_an_optimizer_that_changes_its_groups_options_is_refused() -> None:
    tensor = torch.zeros(2)
    tensor.grad = torch.ones(2)
    optimizer = Counting([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="Counting changes the option 'weight_decay' of its parameter group"):
        step_one(optimizer, optimizer.param_groups[0], tensor, {})


def test_pieces_cover_a_tensor_once_and_none_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameterwise, "PIECE_ELEMENTS", 10)
    pieces = list(pieces_of(torch.zeros(5, 7), elementwise=True))
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 10), (10, 20), (20, 35)]
    assert [(piece.first, piece.last) for piece in pieces] == [(True, False), (False, False), (False, True)]
    assert [piece.whole for piece in pieces_of(torch.zeros(5, 7), elementwise=False)] == [True]


def test_pieces_are_views_in_memory_order() -> None:
    turned = torch.arange(6.0).view(2, 3).t()
    assert flat(turned).tolist() == [0, 1, 2, 3, 4, 5]
    Slice(2, 4, flat=True, first=False, last=False).of(turned).fill_(9.0)
    assert turned.t().tolist() == [[0, 1, 9], [9, 4, 5]]


def test_density_and_strides() -> None:
    x = torch.zeros(4, 6)
    assert [is_dense(tensor) for tensor in (x, x.t(), x[:, ::2], x[:1].expand(4, 6))] == [True, True, False, False]
    assert like(x, x) is x
    assert like(x.t(), torch.zeros(6, 4)).stride() == (4, 1)


def test_only_known_optimizers_are_elementwise() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    assert goes_in_pieces(optim.AdamW(parameters))
    assert not goes_in_pieces(optim.Adafactor(parameters))
    assert not goes_in_pieces(Counting(parameters)), "a subclass may do anything"
