"""Gradients of all optimisers together: found, multiplied, clipped and freed."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from memopt.train.optimizers import clear, clip, multiply, with_gradients


def two() -> tuple[list[torch.Tensor], tuple[optim.Optimizer, ...]]:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first.grad = torch.tensor([3.0, 4.0])
    return [first, second], (optim.SGD([first]), optim.SGD([second]))


def test_only_optimizers_with_a_gradient_step() -> None:
    parameters, optimizers = two()
    assert with_gradients(optimizers) == optimizers[:1]
    clear(parameters)
    with pytest.raises(ValueError, match="no parameter of the optimizers got a gradient"):
        with_gradients(optimizers)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="no norm of sparse gradients; build its module with sparse=False"):
        with_gradients((optim.SGD(table.parameters()),))


def test_the_norm_is_that_before_clipping() -> None:
    parameters, _ = two()
    assert float(clip(parameters, None)) == 5.0
    assert parameters[0].grad is not None
    assert parameters[0].grad.tolist() == [3.0, 4.0]
    multiply(parameters, torch.tensor(2.0))
    assert float(clip(parameters, 1.0)) == 10.0
    assert parameters[0].grad.norm() == pytest.approx(1.0)
