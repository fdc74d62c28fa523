"""What the caller's own code takes between a forward and its backward is in the budget from the second step on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, smooth_l1_loss

import memopt
from memopt.errors import GIB
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
ROWS = 1024
Loss = Callable[[torch.Tensor], torch.Tensor]


def model(returned: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [one for _ in range(6) for one in (nn.Linear(128, 128), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(128, returned)).train()


def classes(logits: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])


def pairs(embedded: torch.Tensor) -> torch.Tensor:
    """A contrastive loss over all pairs, as in SimCLR."""
    unit = normalize(embedded)
    return cross_entropy(unit @ unit.T / 0.1, torch.arange(len(unit)).roll(1))


def several(logits: torch.Tensor) -> torch.Tensor:
    """Several losses by eager code, with an intermediate of its own."""
    targets = logits.detach().softmax(1)
    return classes(logits) + smooth_l1_loss(logits.softmax(1), targets.roll(1, 0)) + logits.exp().mean()


def steps(trained: nn.Module, loss_of: Loss, count: int = 4) -> tuple[list[torch.Tensor], list[int]]:
    """The losses and the peaks of steps."""
    optimizer = torch.optim.SGD(trained.parameters(), 1e-3)
    losses, peaks = [], []
    for number in range(count):
        torch.manual_seed(number)
        batch = torch.randn(ROWS, 128)
        with memopt.measure_peak() as peak:
            loss = loss_of(trained(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach().clone())
        peaks.append(peak.bytes)
    return losses, peaks


@pytest.mark.parametrize(("loss_of", "returned"), [(classes, 1000), (pairs, 64), (several, 500)])
def test_a_loss_outside_of_the_model_is_in_the_budget(loss_of: Loss, returned: int) -> None:
    expected, plain = steps(model(returned), loss_of)
    trained = model(returned)
    lasting = 2 * sum(parameter.nbytes for parameter in trained.parameters())
    budget = lasting + int((max(plain) - lasting) * 0.8)
    memopt.optimize(trained, budget / GIB, precision="fp32", allow={"recompute", "reinplace"}, optimizer="sgd")
    found, peaks = steps(trained, loss_of)
    assert max(peaks[1:]) <= budget, [peak / budget for peak in peaks]
    assert all(map(torch.equal, found, expected))
