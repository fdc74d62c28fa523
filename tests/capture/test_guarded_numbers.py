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
from tests.marks import slow


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


NEEDED: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "a share of a rate": lambda hidden, number: nn.functional.dropout(hidden, 0.1 * number),
    "an exponent": lambda hidden, number: hidden.abs().add(0.1).pow(number),
    "a bound": lambda hidden, number: nn.functional.hardtanh(hidden, -number, number),
    "a size": lambda hidden, number: hidden + hidden.topk(int(10 * number) + 1, -1).values.sum(-1, keepdim=True),
}


class Scheduled(nn.Module):
    """Two layers of an MLP, with an operator between them whose number changes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down, self.number, self.between = nn.Linear(16, 64), nn.Linear(64, 16), 1.0, NEEDED[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.between(torch.relu(self.up(x)), self.number)
        return self.down(hidden).square().mean()


@pytest.mark.plans_always
@pytest.mark.parametrize("name", ["an exponent", *map(slow, sorted({*NEEDED} - {"an exponent"}))])
def test_a_number_whose_value_an_operator_needs(name: str) -> None:
    """Dynamo has no guard on its value, while our trace compares it: it once ended in an error at the first change."""
    plain, x = Scheduled(name), torch.randn(8, 16)
    model = copy.deepcopy(plain)
    memopt.optimize(model, 1, precision="fp32", allow={"recompute"}, optimizer=None, elsewhere_gb=0)
    for number in (1.0, 0.5, 0.25, 0.5):
        gradients = []
        for trained in (plain, model):
            torch.manual_seed(0)
            trained.zero_grad()
            trained.number = number
            trained(x).backward()
            gradients.append([parameter.grad for parameter in trained.parameters()])
        assert all(map(torch.equal, *gradients))
