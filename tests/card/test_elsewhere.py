"""What lies on the card beside a step, as torch's allocator counts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.account.account import BOOKKEEPING_BYTES
from memopt.account.elsewhere import look
from memopt.planning.stages import Priced
from tests.card.card import vision_job
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
MB = 1024**2


def test_blocks_that_the_allocator_does_not_split_are_nothing_elsewhere() -> None:
    """The parameter takes the place of a tensor that was a little larger, and its block has the rest, too."""
    device = torch.device("cuda", 0)
    before = look(nn.Linear(1, 1, device=device), device).other
    larger = torch.empty(30 * MB, dtype=torch.uint8, device=device)
    del larger
    model = nn.Linear(1024, 30 * 256 - 100, bias=False, device=device)
    assert look(model, device).other - before <= BOOKKEEPING_BYTES


def test_inputs_that_the_caller_holds_are_nothing_elsewhere_in_the_backward() -> None:
    """Saved for the backward is a copy in 16 bits."""
    model, batch = vision_job(layers=2, width=512, images=128)
    options = {"precision": "bf16", "backend": "aten"}
    budget_gb = memopt.plan(model, 100.0, batch, **options).plain_peak_gb
    memopt.optimize(model, budget_gb, example_inputs=batch, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert memopt.plan_of(model).account.elsewhere == 0


@pytest.mark.parametrize("by_train_step", [False, True])
def test_copies_of_buffers_by_which_a_call_can_be_undone_are_nothing_elsewhere(by_train_step: bool) -> None:
    """The account has them: counted twice, they took a 64th of the budget."""
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(30)]
    model, images = nn.Sequential(*blocks).cuda(), torch.randn(16, 8, 32, 32, device="cuda")
    options = {"precision": "bf16", "backend": "aten", "loss_fn": lambda output, scale: output.square().mean() * scale}
    batch = images, torch.ones((), device="cuda")
    roomy = memopt.plan(model, 100.0, batch, **options)
    memopt.optimize(model, roomy.smallest_gb() + 0.01, example_inputs=batch, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    step = memopt.TrainStep(model, optimizer)
    for _ in range(3):
        if by_train_step:
            step(batch)
        else:
            optimizer.zero_grad()
            memopt.training_loss(model, batch).backward()
            optimizer.step()
    assert memopt.plan_of(model).account.elsewhere == 0


def test_the_first_step_at_the_smallest_budget_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies by which it can be undone are made once it has begun; they were found elsewhere, so it was refused."""
    planned, solve = [], Priced.solve

    def counted(*args: Any, **options: Any) -> Any:
        planned.append(args)
        return solve(*args, **options)

    monkeypatch.setattr(Priced, "solve", counted)
    blocks = [nn.Sequential(nn.Linear(2048, 2048), nn.BatchNorm1d(2048)) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(2048, 1), nn.Flatten(0)).cuda()
    batch = torch.zeros(512, 2048, device="cuda"), torch.zeros(512, device="cuda")
    options: dict[str, Any] = {"example_inputs": batch, "loss_fn": nn.functional.mse_loss, "precision": "bf16"}
    with pytest.raises(memopt.BudgetError) as refusal:
        memopt.optimize(model, 0.001, backend="aten", **options)
    memopt.optimize(model, refusal.value.smallest_gb, backend="aten", **options)
    ahead = len(planned)
    memopt.training_loss(model, batch).backward()
    assert len(planned) == ahead
    assert memopt.plan_of(model).account.elsewhere == 0
