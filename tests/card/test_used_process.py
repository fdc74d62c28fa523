"""Steps at the smallest budget in a process whose allocator holds scattered blocks of something else."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.card.card import MB, vision_job
from tests.card.test_budgets import check_budgets, job, plain_and_smallest_gb
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")


def scattered(mb: int, every: int, number: int) -> list[torch.Tensor]:
    """Every `every`-th of `number` tensors of `mb` MB each, in whose segments the other tensors have left gaps."""
    tensors = [torch.empty(mb * MB, dtype=torch.uint8, device="cuda") for _ in range(number)]
    kept = tensors[::every]
    del tensors
    torch.cuda.empty_cache()
    return kept


def test_the_smallest_budget_is_kept_between_tensors_that_lie_scattered() -> None:
    """200 MB in segments of 20, of which a tenth is in use: values of more than 18 MB find no room there."""
    kept = scattered(2, 10, 100)
    model, batch = vision_job(layers=4, width=1024, images=32)
    check_budgets(model, batch, torch.optim.AdamW(model.parameters()), "aten", (0.0, 0.1))
    assert len(kept) == 10


def test_the_smallest_budget_is_kept_after_another_model_was_trained() -> None:
    """Every fifth of the first model's moments of AdamW is still held."""
    first, batch = vision_job(layers=2, width=1024, images=32)
    options: dict[str, Any] = {"precision": "bf16", "backend": "aten"}
    memopt.optimize(first, 100.0, example_inputs=batch, **options)
    optimizer = torch.optim.AdamW(first.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        first(**batch).loss.backward()
        optimizer.step()
    kept = [optimizer.state[parameter]["exp_avg"] for parameter in list(first.parameters())[::5]]
    memopt.remove(first)
    del first, batch, optimizer
    torch._dynamo.reset()
    gc.collect()
    model, tokens = job()
    check_budgets(model, tokens, torch.optim.AdamW(model.parameters()), "aten", (0.0, 0.02))
    assert kept


def test_what_an_optimizer_and_gradients_hold_already_is_counted_once() -> None:
    """A model that is optimised again in the middle of its training needs what it needed before."""
    model, batch = vision_job(layers=2, width=512, images=16)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"optimizer": optimizer, "precision": "bf16", "backend": "aten"}
    plain, _ = plain_and_smallest_gb(model, batch, **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    again, _ = plain_and_smallest_gb(model, batch, **options)
    assert again == pytest.approx(plain, rel=0.05)
    state = memopt.plan_of(model).account.card_state
    assert state is not None
    assert state.state_bytes >= 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert state.gradient_bytes >= sum(parameter.nbytes for parameter in model.parameters())
    assert state.other_bytes <= MB


def test_the_same_state_gives_the_same_plan() -> None:
    kept = scattered(2, 10, 50)
    model, batch = vision_job(layers=2, width=256, images=16)
    options: dict[str, Any] = {"precision": "bf16", "backend": "aten"}
    found = [plain_and_smallest_gb(model, batch, **options) for _ in range(2)]
    assert found[0] == found[1]
    assert len(kept) == 5


def test_a_plan_for_another_card_does_not_look_at_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("the allocator was looked at")

    monkeypatch.setattr("memopt.planning.call_accounts.card_state", never)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).cuda()
    inputs = (torch.zeros(8, 64, device="cuda"), torch.zeros(8, 1, device="cuda"))
    plan = memopt.plan(model, 10.0, inputs, loss_fn=nn.MSELoss(), device="a100-40")
    assert plan.account.card_state is None
