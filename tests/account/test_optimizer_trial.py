"""Optimisers tried on stand-in parameters: which parts of an instance are copied, and which optimisers are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from memopt.account.eager_bytes import EagerBytes
from memopt.account.optimizer_trial import fused, optimizer_on_fakes, parameters_of, trial
from memopt.compat.fakes import FakeTensor


def used_adamw() -> optim.AdamW:
    weight = nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    optimizer = optim.AdamW([weight], lr=0.5)
    optimizer.step()
    return optimizer


def test_a_used_optimizer_stands_on_fakes_with_its_own_step_number() -> None:
    optimizer = used_adamw()
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    count = EagerBytes("cpu", "cpu")
    with optimizer_on_fakes(optimizer, parameters_of(optimizer), count, "cpu", foreach=False) as on_fakes:
        (state,) = on_fakes.state.values()
        assert isinstance(state["exp_avg"], FakeTensor)
        assert not isinstance(state["step"], FakeTensor)
        assert on_fakes.param_groups[0]["lr"] == 0.5
        with count:
            on_fakes.step()
    assert float(state["step"]) == 2.0
    (own,) = optimizer.state.values()
    assert float(own["step"]) == 1.0
    assert torch.equal(optimizer.param_groups[0]["params"][0], before)


def test_what_the_constructor_makes_is_counted() -> None:
    weight = torch.ones(4, 3, requires_grad=True)
    count = EagerBytes("cpu", "cpu")
    with optimizer_on_fakes(optim.Adagrad, [weight], count, "cpu", foreach=False):
        assert count.live_bytes == weight.nbytes + 4, "its sums, and the step number"


def test_fused_variants() -> None:
    assert fused(None) is None
    assert fused(optim.LBFGS) is fused("adadelta") is fused(partial(optim.AdamW, fused=True)) is None
    optimizer = used_adamw()
    variant = fused(optimizer)
    assert isinstance(variant, optim.AdamW)
    assert (variant.param_groups[0]["fused"], optimizer.param_groups[0]["fused"]) == (True, None)


def test_refusals_name_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"not 3$"):
        trial(3, {}, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a list; combine several into one Optimizer"):
        trial([used_adamw(), used_adamw()], {}, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no optimizer 'adamv'"):
        trial("adamv", {}, torch.device("cpu"))
