"""Several forwards before a backward: two answers (DPO), two views (SimCLR). The plain models' bits within the budget,
with at most one refusal, which says what to plan for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTConfig, ViTModel

import memopt
from examples.models.families import normals
from tests.elsewhere import counted
from tests.end_to_end.company import ALL, GIB, Step, assert_same, assert_within, gpt2, tokens, train

__all__ = ["counted"]

pytestmark = [pytest.mark.usefixtures("counted"), pytest.mark.plans_always]


def preferring(policy: Any, reference: Any) -> Step:
    """Training steps that prefer one answer to another (DPO), with two forwards of the policy before its backward."""
    optimizer = torch.optim.AdamW(policy.parameters())
    answers = tokens(1, 4), tokens(2, 4)

    def probability(model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum((-2, -1))

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            before = [probability(reference, ids) for ids in answers]
        chosen, rejected = (probability(policy, ids) - old for ids, old in zip(answers, before, strict=True))
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_chosen_and_rejected(told: bool) -> None:
    """A budget that is too tight for two forwards planned by themselves is kept once two are planned for."""
    reference = gpt2(tied=False, seed=5).eval().requires_grad_(False)
    policy = gpt2(tied=False)
    twin = copy.deepcopy(policy)
    plain = train(preferring(twin, reference), twin)
    del twin
    plan = memopt.plan(policy, 1, {"input_ids": tokens(1, 4)}, **ALL)
    budget = plan.plain_peak_gb + 0.3 * (plan.account.gradients + plan.held_bytes) / GIB
    assert budget * GIB < plan.plain.peak_bytes + plan.held_bytes
    memopt.optimize(policy, budget, forwards=2 if told else 1, **ALL)
    trained = train(preferring(policy, reference), policy)
    assert_same(trained, plain)
    assert_within(trained, budget)
    assert len(trained.refusals) <= (0 if told else 1)
    assert all("forwards=2" in text for text in trained.refusals)
    assert memopt.plan_of(policy).account.other_forwards > 0


def contrasting(model: Any) -> Step:
    """Training steps that compare two views of each image (SimCLR)."""
    optimizer = torch.optim.AdamW(model.parameters())
    views = normals(8, 3, 32, 32, seed=1), normals(8, 3, 32, 32, seed=2)

    def step() -> Tensor:
        optimizer.zero_grad()
        one, other = (F.normalize(model(pixel_values=view).pooler_output, dim=-1) for view in views)
        loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(8))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def vit() -> Any:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, image_size=32, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config).train()


@pytest.mark.slow
def test_two_views() -> None:
    model = vit()
    twin = copy.deepcopy(model)
    plain = train(contrasting(twin), twin)
    del twin
    plan = memopt.plan(model, 1, {"pixel_values": normals(8, 3, 32, 32, seed=1)}, **ALL)
    budget = plan.plain_peak_gb + 0.2 * plan.held_bytes / GIB
    memopt.optimize(model, budget, **ALL)
    trained = train(contrasting(model), model)
    assert_same(trained, plain)
    assert_within(trained, budget)
    assert len(trained.refusals) <= 1
    assert all("forwards=2" in text for text in trained.refusals)
    assert memopt.plan_of(model).account.other_forwards > 0
