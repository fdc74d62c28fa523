"""Small models and the objects that their calls go through, for tests of the road."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.capture.inputs import Call
from memopt.compat.modules import Parts
from memopt.planning.options import check_options
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.run.call_in_progress import CallInProgress
from memopt.run.entry import Entry
from memopt.run.ledger import Ledger, Moment
from memopt.run.session import Session
from memopt.run.training import TrainingCalls


class Blocks(nn.Module):
    """A few layers, in one region, or in two where `breaks`."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.breaks = breaks

    def half(self, x: torch.Tensor, start: int) -> torch.Tensor:
        for layer in self.layers[start : start + 2]:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.half(x, 0)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.half(x, 2).pow(2).mean()


def moment_of(entry: Entry, **fields: Any) -> Moment:
    """A moment of the entry's model, in the ledger of its device."""
    return Moment(entry, Ledger.of(entry), **fields)


def begun_call(
    moment: Moment,
    call: Call = ((), {}),
    situation: Situation | None = None,
    begin: Callable[..., Any] = lambda *given: None,
) -> CallInProgress:
    """A call of the model of the moment's entry."""
    return CallInProgress(call, situation or Situation(), moment, Parts.of(moment.entry.model), begin)


def make(*, breaks: bool = False) -> Blocks:
    torch.manual_seed(0)
    return Blocks(breaks=breaks).train()


def calls_of(model: nn.Module, budget_gb: float = 1.0, **options: Any) -> TrainingCalls:
    """The training calls of a model, planned in fp32 and run as plain operators."""
    return session_for(model, budget_gb, **options).forward


def latest(calls: TrainingCalls) -> Plan:
    """The plan of the latest call of the session that these calls belong to."""
    found: Plan | None = calls._run.__self__.latest  # type: ignore[attr-defined]
    assert found is not None
    return found


def session_for(model: nn.Module, budget_gb: float = 1.0, **options: Any) -> Session:
    """The session of a model, planned in fp32 and run as plain operators."""
    exact: dict[str, Any] = {"precision": "fp32", "allow": {"recompute"}, "optimizer": None, **options}
    return Session(model, check_options(budget_gb, **exact))


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def torchs_own_backward() -> object:
    """Torch's function that starts a backward, put back in its place if forwards of other tests waited for theirs."""
    gc.collect()
    torch.ones(1, requires_grad=True).sum().backward()
    return torch.autograd.graph._engine_run_backward
