"""Optimisers, schedulers and limits that a TrainStep takes or refuses, and the gradients of all optimisers together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, lr_scheduler

from memopt.account.optimizer_trial import parameters_of
from memopt.optimizers import OptimizerInBackward
from memopt.planning.options import positive_int
from memopt.train.optimizers import (
    as_optimizers,
    as_schedulers,
    clear,
    clip,
    multiply,
    norm_limit,
    with_gradients,
)

MODEL = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
BODY, HEAD = SGD(MODEL[0].parameters()), SGD(MODEL[1].parameters())


def test_one_or_several() -> None:
    assert as_optimizers(BODY, MODEL, None) == (BODY,)
    both = as_optimizers([BODY, HEAD], MODEL, None)
    assert [parameter.shape for parameter in parameters_of(*both)] == [
        parameter.shape for parameter in MODEL.parameters()
    ]


def test_parameters_of_a_loss_function_are_known() -> None:
    loss_fn = nn.Linear(1, 1)
    assert as_optimizers(SGD(loss_fn.parameters()), MODEL, loss_fn)


def test_groups_added_later_are_seen() -> None:
    optimizer = SGD(MODEL[0].parameters())
    optimizer.add_param_group({"params": list(MODEL[1].parameters())})
    assert len(parameters_of(optimizer)) == 4


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        ([], ValueError, "list of optimizers is empty"),
        (SGD, TypeError, "must be a torch.optim.Optimizer or a list"),
        ([BODY, "adam"], TypeError, "not 'adam'"),
        (torch.optim.LBFGS(MODEL.parameters()), ValueError, "LBFGS"),
        (OptimizerInBackward(SGD(MODEL.parameters(), 0.1)), ValueError, "before TrainStep could clip or skip"),
        (SGD(nn.Linear(5, 4).parameters()), ValueError, r"2 of the 2 parameters .* not Sequential's.*shape \(4, 5\)"),
        ([BODY, SGD(MODEL.parameters())], ValueError, "in two optimizers"),
    ],
)
def test_optimizers_refused(optimizer: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_optimizers(optimizer, MODEL, None)


def test_parameters_in_fp16_are_refused() -> None:
    model = nn.Linear(2, 1).half()
    with pytest.raises(ValueError, match="keep parameters in float32"):
        as_optimizers(SGD(model.parameters()), model, None)


def test_complex_parameters_are_refused() -> None:
    model = nn.Linear(2, 1).to(torch.complex64)
    with pytest.raises(ValueError, match="GradScaler, which takes real ones only"):
        as_optimizers(SGD(model.parameters()), model, None)


def test_schedulers() -> None:
    constant = lr_scheduler.ConstantLR(BODY)
    sequence = lr_scheduler.SequentialLR(BODY, [lr_scheduler.ConstantLR(BODY), constant], [2])
    assert as_schedulers(None, (BODY,)) == ()
    assert as_schedulers(constant, (BODY,)) == (constant,)
    assert as_schedulers([constant, sequence], (BODY, HEAD)) == (constant, sequence)


@pytest.mark.parametrize(
    ("scheduler", "error", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau(BODY), TypeError, r"call its step\(metric\) yourself"),
        (lr_scheduler.ConstantLR(HEAD), ValueError, "ConstantLR is of another optimizer"),
        ("cosine", TypeError, "not 'cosine'"),
    ],
)
def test_schedulers_refused(scheduler: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_schedulers(scheduler, (BODY,))


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)])
def test_whole_numbers(value: Any, error: type[Exception]) -> None:
    assert positive_int("accumulate", 3) == 3
    with pytest.raises(error, match=f"accumulate must be .*not {value}"):
        positive_int("accumulate", value)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError)]
)
def test_limits_of_the_norm(value: Any, error: type[Exception]) -> None:
    assert norm_limit(None) is None
    assert norm_limit(2) == 2.0
    with pytest.raises(error, match="max_grad_norm must be"):
        norm_limit(value)


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
