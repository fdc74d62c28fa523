"""`plan.explain`: the largest values, and the story of an operator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt


def test_a_model_of_one_s_own() -> None:
    model = nn.Sequential()
    model.add_module("up", nn.Linear(8, 32))
    model.add_module("act", nn.GELU())
    model.add_module("down", nn.Linear(32, 8))
    batch = torch.zeros(16, 8), torch.zeros(16, 8)
    options = {"loss_fn": nn.functional.mse_loss, "precision": "fp32", "allow": {"recompute"}}
    plan = memopt.plan(model, 1, batch, **options)
    assert "The largest values that the backward needs" in plan.explain()
    story = plan.explain("up")
    assert " ops of 'up'; below is the one whose forward takes longest" in story
    assert "fate" in plan.explain("addmm")
    with pytest.raises(ValueError, match="no op is named 'nothing'"):
        plan.explain("nothing")
