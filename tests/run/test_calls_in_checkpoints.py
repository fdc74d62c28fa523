"""Calls within a checkpoint of the caller's: its second run, in the backward, saves what the first one saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.compat.saved_tensors import checkpoint_around, unseen_by_checkpoints

GB = 1 / 2**30


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def _alone(model: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    return head(checkpoint(model, x, use_reentrant=False)).square().mean()


def _with_more(model: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = checkpoint(lambda x: head(model(x).tanh()).square().mean(), x, use_reentrant=False)
    return loss


def _gradients(step: Callable[..., Tensor], budget: float | None) -> tuple[list[Tensor], str]:
    torch.manual_seed(0)
    model, head = Blocks(), nn.Linear(32, 8)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    if budget:
        memopt.optimize(model, budget * GB, optimizer=optimizer, precision="fp32", allow={"recompute", "reinplace"})
    found = []
    for rows in (512, 512, 480, 512):
        loss = step(model, head, torch.randn(rows, 32))
        loss.backward()
        found += [loss.detach(), *(one.grad.clone() for one in parameters if one.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found, memopt.status(model).state.value if budget else ""


@pytest.mark.parametrize(("megabytes", "state"), [(1.4, "planned"), (64, "plain")])
def test_a_checkpoint_around_the_call_alone(megabytes: float, state: str) -> None:
    _compare(_alone, megabytes, state)


def test_a_checkpoint_around_a_plain_call_and_more() -> None:
    _compare(_with_more, 64, "plain")


@pytest.mark.plans_always
def test_a_checkpoint_around_a_planned_call_and_more() -> None:
    _compare(_with_more, 8, "planned")


def _compare(step: Callable[..., Tensor], megabytes: float, state: str) -> None:
    plain, _ = _gradients(step, None)
    found, ran = _gradients(step, megabytes * 2**20)
    assert ran == state
    assert all(map(torch.equal, plain, found))
    assert len(plain) == len(found)


def test_a_refusal_of_the_second_run_says_what_would_help() -> None:
    with pytest.raises(memopt.BudgetError, match="call the model without torch"):
        _gradients(_with_more, 1.4 * 2**20)


def test_the_checkpoint_around_code_is_known_by_its_first_and_second_run() -> None:
    seen = []

    def run(x: Tensor) -> Tensor:
        seen.append(checkpoint_around())
        with unseen_by_checkpoints():
            assert checkpoint_around() is None
            x.sin()  # saves x
        return x.cos()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    (first, again), (second, later) = (one for one in seen if one is not None)
    assert first is second
    assert (again, later) == (False, True)
    assert checkpoint_around() is None
