"""The state of an optimised model, as a user sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import memopt
from memopt import State
from tests.end_to_end import odd_models
from tests.run.pieces import Blocks, make, session_for

EXACT = {"precision": "fp32", "allow": {"recompute"}, "optimizer": None, "elsewhere_gb": 0}


def train(model: Blocks, rows: int = 8) -> None:
    model(torch.randn(rows, 32)).backward()


@pytest.mark.plans_always
def test_a_model_that_has_not_trained_is_new() -> None:
    model = memopt.optimize(make(), 1, **EXACT)
    assert str(memopt.status(model)) == "Blocks: new, no training call has come yet"
    model(torch.randn(8, 32))
    assert memopt.status(model).state is State.PLANNED


@pytest.mark.plans_always
@pytest.mark.parametrize("breaks", [False, True])
def test_a_planned_call_has_the_figures_of_its_plan(breaks: bool) -> None:
    model = memopt.optimize(make(breaks=breaks), 1, **EXACT)
    train(model)
    status = memopt.status(model)
    assert status.state is State.PLANNED
    assert status.plan == replace(memopt.plan_of(model), receipt=status.plan.receipt)
    assert str(status).startswith("Blocks: planned, (8, 32): peak ")
    assert "of 1 GB, added time 0.0%" in str(status)


def test_a_plan_made_ahead_is_planned() -> None:
    model = memopt.optimize(make(), 1, example_inputs=(torch.randn(8, 32),), **EXACT)
    assert memopt.status(model).state is State.PLANNED


def test_a_step_that_fits_is_plain_and_says_what_is_spare() -> None:
    model = memopt.optimize(make(), 1, **EXACT)
    train(model)
    status = memopt.status(model)
    assert (status.state, status.plan) == (State.PLAIN, None)
    assert "since its step fits the budget with" in str(status)
    assert memopt.plan_of(model) is memopt.plan_of(model)  # made to be shown
    assert memopt.status(model) is status


def test_the_plan_of_a_plain_call_is_that_of_the_latest_one() -> None:
    """Also where the count of a larger call serves it."""
    model = memopt.optimize(make(), 1, **EXACT)
    shown = []
    for rows in (8, 32, 8):
        train(model, rows)
        shown.append(memopt.plan_of(model).account.inputs)
    assert shown[0] == shown[2] == shown[1] // 4


@pytest.mark.plans_always
def test_a_refused_call_has_the_refusal_and_another_one_is_planned() -> None:
    model = memopt.optimize(make(), 1e-4, **EXACT)
    with pytest.raises(memopt.BudgetError) as refused:
        train(model, 512)
    status = memopt.status(model)
    assert (status.state, status.reason) == (State.REFUSED, str(refused.value))
    train(model, 8)
    assert memopt.status(model).state is State.PLANNED


@pytest.mark.plans_always
def test_an_unplanned_model_says_why() -> None:
    odd = odd_models.BY_NAME["Uncapturable"]
    model = memopt.optimize(odd.make(), 1, **{**EXACT, "allow": {"recompute", "plain"}})
    with pytest.warns(UserWarning, match="trains without a plan"):
        model(**odd.inputs())
    status = memopt.status(model)
    assert status.state is State.UNPLANNED
    assert "odd_models.py:" in status.reason


def test_a_plain_model_has_no_status() -> None:
    with pytest.raises(ValueError, match="not optimised"):
        memopt.status(make())


@pytest.mark.plans_always
def test_calls_with_and_without_the_loss_function_wait_in_one_place() -> None:
    session = session_for(make(), loss_fn=lambda output, target: output * target)
    x = torch.randn(64, 32)
    first = session.forward(x)
    assert len(session.share.entry.all_waiting()) == 1
    second = session.loss((x, torch.ones(())))
    assert len(session.share.entry.all_waiting()) == 2
    (first + second).backward()
    assert len(session.share.entry.all_waiting()) == 0
    assert session.status.state is State.PLANNED
