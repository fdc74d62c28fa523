"""Optimiser state of parameters that a call does not reach, such as the image encoder of a model that reads text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute"}, "optimizer": torch.optim.AdamW, "elsewhere_gb": 0}


class TwoEncoders(nn.Module):
    """Reads text, an image, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(64, 64), nn.Linear(256, 64)

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.text(text))
        if image is not None:
            h = h + torch.tanh(self.image(image))
        return h.pow(2).mean()


def test_only_parameters_with_gradients_have_state_until_another_call_reaches_more() -> None:
    model = TwoEncoders().train()
    text, image = torch.randn(32, 64), torch.randn(32, 256)
    memopt.optimize(model, 1, example_inputs=(text,), **EXACT)
    own = sum(parameter.nbytes for parameter in model.text.parameters())
    every = sum(parameter.nbytes for parameter in model.parameters())
    assert 2 * own <= memopt.plan_of(model).account.optimizer_state < 3 * own
    model(text).backward()
    model.zero_grad()
    model(text, image).backward()
    assert memopt.plan_of(model).account.optimizer_state >= 2 * every
    model.zero_grad()
    model(text).backward()
    assert memopt.plan_of(model).account.optimizer_state >= 2 * every, "the state is there from the call before"


class Tagger(nn.Module):
    """Returns a loss, and tags that a second head makes from the same features."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.tags = nn.Linear(64, 64), nn.Linear(64, 1), nn.Linear(64, 512)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.body(x))
        return {"loss": self.head(h).pow(2).mean(), "tags": self.tags(h)}


@pytest.mark.parametrize("outputs", ["loss", "all"])
def test_parameters_of_an_output_that_the_caller_may_differentiate_have_state(outputs: Any) -> None:
    """The loss is not computed from the second head, whose tags are for a loss of the caller's."""
    plan = memopt.plan(Tagger().train(), 1, (torch.randn(32, 64),), outputs=outputs, **EXACT)
    own = sum(parameter.nbytes for parameter in Tagger().parameters())
    assert plan.account.gradients == own
    assert 2 * own <= plan.account.optimizer_state < 2 * own + 1024


def test_gradients_that_are_held_count_with_those_of_the_call() -> None:
    model = TwoEncoders().train()
    text = torch.randn(32, 64)
    memopt.optimize(model, 1, example_inputs=(text,), **EXACT)
    own = sum(parameter.nbytes for parameter in model.text.parameters())
    every = sum(parameter.nbytes for parameter in model.parameters())
    model(text).backward()
    model(text).backward()
    assert memopt.plan_of(model).account.gradients == own
    model.image.weight.norm().backward()  # outside of any call
    model(text).backward()
    assert memopt.plan_of(model).account.gradients == every - model.image.bias.nbytes


def test_an_optimizer_that_is_given_has_state_for_what_calls_reach_or_it_has_stepped() -> None:
    model = TwoEncoders().train()
    optimizer = torch.optim.AdamW(model.parameters())
    text, image = torch.randn(32, 64), torch.randn(32, 256)
    memopt.optimize(model, 1, example_inputs=(text,), **EXACT | {"optimizer": optimizer})
    own = sum(parameter.nbytes for parameter in model.text.parameters())
    every = sum(parameter.nbytes for parameter in model.parameters())

    def step(*batch: torch.Tensor) -> tuple[int, int]:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        account = memopt.plan_of(model).account
        return account.gradients, account.optimizer_state // 1024

    for _ in range(2):
        assert step(text) == (own, 2 * own // 1024)
    assert step(text, image) == (every, 2 * every // 1024)
    assert step(text) == (own, 2 * every // 1024), "the state is there from the call before"


@pytest.mark.plans_always
def test_parameters_that_are_trained_outside_of_the_forward_count_from_the_second_step() -> None:
    model = TwoEncoders().train()
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.randn(32, 64)
    memopt.optimize(model, 1, **EXACT | {"optimizer": optimizer})
    found = []
    for _ in range(3):
        (model(text) + model.image.weight.norm()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(memopt.plan_of(model).account.gradients)
    own = sum(parameter.nbytes for parameter in model.text.parameters())
    assert found == [own, *[own + model.image.weight.nbytes] * 2]
