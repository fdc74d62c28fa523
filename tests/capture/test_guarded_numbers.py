"""Numbers that a schedule changes between steps: constants where the forward compares them, else inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import memopt
from examples.models.families import BY_NAME
from examples.models.step import Step, train_step


class Annealed(nn.Module):
    """A ViT whose loss a schedule weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.weight = BY_NAME["vit"].make(), 1.0

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.vit(**batch).loss * self.weight
        return loss


def set_dropout(model: nn.Module, number: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1 * number


def set_weight(model: nn.Module, number: int) -> None:
    model.weight = 1.0 / (1 + number)  # type: ignore[assignment]


@pytest.mark.plans_always
@pytest.mark.slow
@pytest.mark.parametrize("schedule", [set_dropout, set_weight])
def test_a_number_that_a_schedule_changes(schedule: Callable[[nn.Module, int], None]) -> None:
    """Dropout compares its probability while it is traced, which once ended in an error at the first change."""
    plain, batch = Annealed(), BY_NAME["vit"].batch("usual")
    model = copy.deepcopy(plain)
    memopt.optimize(model, 1, precision="fp32", allow={"recompute"}, optimizer=None, elsewhere_gb=0)
    for number in range(3):
        steps: list[Step] = []
        for trained in (plain, model):
            schedule(trained, number)
            steps.append(train_step(trained, batch))
        assert torch.equal(steps[0].loss, steps[1].loss)
        assert all(torch.equal(steps[0].gradients[name], steps[1].gradients[name]) for name in steps[0].gradients)
