"""Loops that catch an error of the model's own code for a bad batch and go on: the failed call leaves what the plain
one leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt


class Net(nn.Module):
    """Fails after its second block where `fault` finds something wrong with the values or the indices."""

    def __init__(self, fault: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 32))
            for _ in range(3)
        ]
        self.blocks, self.fault, self.calls = nn.Sequential(*blocks), fault, 0
        self.table = nn.Embedding(10, 32)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, flag: bool = False) -> torch.Tensor:
        self.calls += 1
        x = self.blocks[:2](x)
        x = self.fault(self.table, x, ids, flag)
        return self.blocks[2:](x).square().mean()


def by_flag(_: nn.Module, x: torch.Tensor, __: torch.Tensor, flag: bool) -> torch.Tensor:
    if flag:
        raise ValueError("bad batch")
    return x


def by_value(_: nn.Module, x: torch.Tensor, *__: Any) -> torch.Tensor:
    if x.abs().max() > 20:
        raise ValueError("bad batch")
    return x


def by_index(table: nn.Module, x: torch.Tensor, ids: torch.Tensor, _: bool) -> torch.Tensor:
    found: torch.Tensor = table(ids)
    return x + found


def _losses_and_state(fault: Callable[..., torch.Tensor], budget_gb: float | None) -> list[Any]:
    torch.manual_seed(0)
    model, found = Net(fault), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if budget_gb is not None:
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    for step in range(5):
        x, ids, bad = torch.randn(256, 32), torch.randint(0, 10, (256,)), step in (1, 3)
        if bad:
            x[0, 0], ids[3] = 1e6, 10
        optimizer.zero_grad()
        try:
            loss = model(x, ids, bad)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            del loss
        except (ValueError, IndexError) as error:
            found.append(type(error))
        found += [model.calls, torch.get_rng_state(), *(value.clone() for value in model.state_dict().values())]
    return found


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("always", [True, False], ids=["planned", "plain"])
@pytest.mark.parametrize("fault", [by_flag, by_value, by_index])
def test_a_failed_forward_leaves_what_the_plain_one_leaves(
    fault: Callable[..., torch.Tensor], always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if always:
        monkeypatch.setenv("MEMOPT_PLAN", "always")
    pairs = zip(_losses_and_state(fault, None), _losses_and_state(fault, 1.0), strict=True)
    for number, (plain, planned) in enumerate(pairs):
        assert _is_same(plain, planned), number
