"""A forward that writes to parameters, as that of a momentum encoder, writes to them once in each step, however often
memopt runs it to see what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.saved_values import written_parameters
from memopt.training_state import undone

pytestmark = pytest.mark.plans_always
EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


def _set_data(mean: nn.Parameter, new: nn.Parameter) -> None:
    mean.data = 0.5 * mean.data + 0.5 * new.data  # MoCo


def _write_to_data(mean: nn.Parameter, new: nn.Parameter) -> None:
    mean.data.mul_(0.5).add_(new.data, alpha=0.5)  # BYOL, ALBEF


def _write(mean: nn.Parameter, new: nn.Parameter) -> None:
    mean.lerp_(new, 0.5)


class Momentum(nn.Module):
    """MoCo's shape: an encoder, an average of it, and a queue whose pointer is read as a number."""

    def __init__(self, update: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.randn(32, 16))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.update = update

    def averaged(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, new in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.update(mean, new)
            keys: Tensor = self.key(x)
            return keys


class Queue(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        keys, queries, at = self.averaged(x), self.query(x), int(self.pointer)
        loss = (queries @ self.queue.clone().T).square().mean() + (queries * keys).mean()
        with torch.no_grad():
            self.queue[at : at + len(x)] = keys
            self.pointer[0] = (at + len(x)) % len(self.queue)
        return loss


class Selects(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        keys, queries = self.averaged(x), self.query(x)
        return queries[keys.sum(1) > 0].square().sum() + (queries * keys).mean()


class Breaks(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        keys, queries = self.averaged(x), self.query(x)
        return (queries * keys).square().mean() * (2 if float(keys.mean().numpy()) > 0 else 1)


@pytest.mark.parametrize("update", [_set_data, _write_to_data, _write])
@pytest.mark.parametrize("kind", [Queue, Selects, Breaks])
def test_each_step_writes_once(kind: type[Momentum], update: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
    def train(*, planned: bool) -> tuple[list[float], list[Tensor]]:
        model, losses = kind(update), []
        optimizer = torch.optim.SGD(model.query.parameters(), 0.1)
        if planned:
            memopt.optimize(model, 1, optimizer=optimizer, **EXACT)
        for x in torch.randn(4, 8, 16):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [value.detach() for value in (*model.parameters(), *model.buffers())]

    losses, values = train(planned=False)
    own_losses, own_values = train(planned=True)
    assert own_losses == losses
    assert all(map(torch.equal, own_values, values))


@pytest.mark.parametrize("update", [_set_data, _write_to_data, _write])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_what_a_trial_has_written_is_undone_and_remembered(
    update: Callable[[nn.Parameter, nn.Parameter], None], dtype: torch.dtype
) -> None:
    model = Breaks(update).to(dtype)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    with undone(model), torch.no_grad():
        for mean, new in zip(model.key.parameters(), model.query.parameters(), strict=True):
            update(mean, new)
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())
    written = written_parameters(model)
    assert [id(one) for one in written] == [id(one) for one in model.key.parameters()]
