"""Runs ahead of a training call, which count, record, plan or compare it, leave what the call is given and what its
model remembers as they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memopt

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}


class WithInputs(nn.Module):
    """Writes to an input, and multiplies by another tensor; with `breaks` it reads a value on its way."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(64, 64), nn.Linear(64, 64), breaks
        self.other: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        x = torch.tanh(self.first(x))
        x = x if self.other is None else x * self.other
        if self.breaks and x.abs().max().item() > 0:
            x = self.last(x)
        return x.pow(2).mean() * seen.sum()


def results_before(kind: str, before: nn.Module, model: Any) -> list[torch.Tensor]:
    """Train twice behind another module, whose result is an input of the model or what it multiplies by, or with an
    input that requires a gradient; return the losses, what the model wrote to, and all gradients."""
    found = []
    for number in range(2):
        torch.manual_seed(number)
        x, seen = torch.randn(32, 64), torch.zeros(3)
        model.other = before(x).mean(0) if kind == "another factor" else None
        given = before(x) if kind == "a result" else x.requires_grad_(kind == "a leaf")
        loss = model(given, seen)
        loss.backward()
        model.other = None
        gradients = [leaf.grad for leaf in (x, *before.parameters(), *model.parameters())]
        found += [loss.detach(), seen, *(one.clone() for one in gradients if one is not None)]
    return found


@pytest.mark.parametrize("plan", ["always", "if needed"])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("kind", ["a result", "a leaf", "another factor"])
def test_inputs_have_their_values_and_gradients_once(
    kind: str, breaks: bool, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a step is counted, recorded or planned before it runs."""
    monkeypatch.setenv("MEMOPT_PLAN", plan)
    torch.manual_seed(0)
    before, model = nn.Sequential(nn.Linear(64, 64), nn.GELU()), WithInputs(breaks).train()
    plain = copy.deepcopy((before, model))
    memopt.optimize(model, 1.0, **EXACT)
    assert all(map(torch.equal, results_before(kind, before, model), results_before(kind, *plain)))


@pytest.mark.parametrize("kind", ["a result", "a leaf"])
def test_a_comparison_leaves_its_batch_as_it_is(kind: str) -> None:
    torch.manual_seed(0)
    before, model = nn.Linear(64, 64), WithInputs(breaks=False).train()
    memopt.optimize(model, 1.0, **EXACT)
    x, seen = torch.randn(32, 64), torch.zeros(3)
    given = before(x) if kind == "a result" else x.requires_grad_()
    found = memopt.compare(model, (given, seen))
    assert found.bitwise
    assert (seen == 0).all()
    assert x.grad is None
    model(given, seen).backward()


class Remembering(nn.Module):
    """Writes to tensors that are attributes of its own but no buffers, on one of two ways after a value is read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.calls, self.means = torch.zeros(()), [torch.zeros(64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.layers[0](x))
        self.means[0].lerp_(x.detach().mean(0), 0.5)
        x = self.layers[1](x).relu() if x.sum().item() > 0 else torch.sin(self.layers[2](x))
        return (x - self.means[0]).pow(2).mean() * self.calls


@pytest.mark.parametrize("plan", ["always", "if needed"])
def test_what_a_module_remembers_is_written_once(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", plan)
    torch.manual_seed(0)
    model = Remembering().train()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    for number in range(6):
        torch.manual_seed(number)
        x = torch.randn(32, 64)
        for one in (model, plain):
            one.zero_grad()
            one(x).backward()
        assert model.calls == plain.calls == number + 1
        assert torch.equal(model.means[0], plain.means[0])
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)


class ChoosingAfterAWrite(nn.Module):
    """Writes to an input, then goes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        x = torch.tanh(self.layers[0](x))
        x = self.layers[1](x).relu() if x.sum().item() > 0 else torch.sin(self.layers[2](x))
        return x.pow(2).mean() * seen.sum()


@pytest.mark.plans_always
@pytest.mark.parametrize("size", [3, 100_000])
def test_a_forward_that_is_begun_again_writes_once(size: int) -> None:
    torch.manual_seed(0)
    model = ChoosingAfterAWrite().train()
    plain = copy.deepcopy(model)
    memopt.optimize(model, 1.0, **EXACT)
    ways = set()
    for number in range(6):
        torch.manual_seed(number)
        x, seen, ours = torch.randn(32, 64), torch.zeros(size), torch.zeros(size)
        loss, expected = model(x, ours), plain(x, seen)
        assert torch.equal(loss, expected)
        assert torch.equal(ours, seen)
        ways.add(bool(torch.tanh(plain.layers[0](x)).sum() > 0))
    assert len(ways) == 2
