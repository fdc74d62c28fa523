"""Through inductor, a recomputation in bf16 rounds otherwise than the forward: what decides is computed once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.capture.joint import JointGraph
from memopt.planning import joined
from memopt.solver import Portfolio, RematProblem, Schedule, Solution, simulate

WIDTH, EXPERTS, TOKENS = 64, 8, 4096


class Routed(nn.Module):
    """Tokens routed to two of eight experts. The gradient of `seats` is 1 where the backward takes a token to be
    routed, that of `shift` is 1 where it takes a row to be the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 8)
        self.seats = nn.Parameter(torch.zeros(TOKENS, EXPERTS))
        self.shift = nn.Parameter(torch.zeros(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x + F.gelu(self.inner(x))
        weights, chosen = self.gate(self.norm(h)).softmax(-1).topk(2, -1)
        mixed = self.down(h) + (self.experts[chosen] * weights.unsqueeze(-1)).sum(1)
        largest = (mixed.sin() + self.shift).amax(-1)
        loss = mixed.square().mean() + self.seats.gather(1, chosen).sum() + largest.sum()
        return loss, F.one_hot(chosen, EXPERTS).sum(1)


class RecomputeAll(Portfolio):
    """All that may be recomputed is computed again before the backward."""

    def __init__(self, problem: RematProblem, *others: Any) -> None:
        super().__init__(problem, *others)
        self.given = problem

    def solve(self, *_: Any, **__: Any) -> Solution:
        problem, forward = self.given, range(self.given.forward_ops)
        again = (number for number in forward if problem.ops[number].recomputable)
        schedule = Schedule((*forward, *again, *range(problem.forward_ops, len(problem.ops))))
        measured = simulate(problem, schedule)
        return Solution(schedule, measured.peak_bytes, measured.added_seconds, 0.0, "all again")


@contextmanager
def all_again() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joined, "Portfolio", RecomputeAll)
        yield


def flips() -> tuple[int, int, memopt.Plan]:
    """The tokens whose experts in the backward are others than in the forward, and the rows without one largest value,
    or with NaN, in a planned step that recomputes all it may; with its plan."""
    torch.manual_seed(0)
    model = Routed().train().bfloat16()
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    with all_again():
        memopt.optimize(
            model, 1, example_inputs=(x,), backend="inductor", precision="fp32", optimizer=None, allow={"recompute"}
        )
        loss, routed = model(x)
        loss.backward()
    plan = memopt.plan_of(model)
    assert model.seats.grad is not None
    assert model.shift.grad is not None
    lost = (model.shift.grad.float().sum(-1) - 1).abs() > 0.01
    return int((routed != model.seats.grad).any(-1).sum()), int((lost | lost.isnan()).sum()), plan


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.slow  # a minute of compiling each
@pytest.mark.plans_always
def test_experts_of_the_backward_are_those_of_the_forward() -> None:
    flipped, lost, plan = flips()
    assert (flipped, lost) == (0, 0)
    assert {row.operator for row in plan.decisions} >= {"topk", "amax"}
    assert any(plan.regions[0].evaluations.count(name) > 1 for name in plan.regions[0].evaluations)


@pytest.mark.slow
@pytest.mark.plans_always
def test_without_marks_they_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The need for the marks: should this fail one day, inductor rounds alike in both halves."""
    monkeypatch.setattr(JointGraph, "decisions", frozenset())
    flipped, _, plan = flips()
    assert flipped > 0
    assert not plan.decisions
