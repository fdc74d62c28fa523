"""Operators whose bits a trace does not keep are named, and others are not."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import TensorVariable
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.capture.dynamo_graph import BETWEEN_REGIONS, BUFFERS_WRITTEN_ONCE, departures
from tests.capture.recorded import recorded


class Calling(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(torch.ones(4, 3)), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x * self.weight).sum()


def drawn(x: Tensor) -> Tensor:
    return torch.empty_like(x.t()).bernoulli_(0.5) * x.t()


def drawn_in_rows(x: Tensor) -> Tensor:
    return torch.empty_like(x).bernoulli_(0.5) * x


def under_checkpoints(x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(torch.prod, y, use_reentrant=False) * y, x, use_reentrant=False)


MOVED = "" if hasattr(TensorVariable, "_view_attr") else "torch.utils.checkpoint"
"""The note on `x.mT` in a block: none under torch 2.15, where Dynamo traces it as an operator and leaves it there."""

CELL = nn.GRUCell(3, 3)
CALLS = [
    (under_checkpoints, "prod"),
    (lambda x: x.prod(1), "prod"),
    (torch.prod, "prod"),
    (drawn, "bernoulli_"),
    (drawn_in_rows, ""),
    (lambda x: x.masked_fill(x > 0, x.sum()), "masked_fill"),
    (lambda x: torch.masked_fill(x, x > 0, value=x.sum()), "masked_fill"),
    (lambda x: x.sin().masked_fill_(x > 0, x.sum()), "masked_fill"),
    (lambda x: x.masked_fill(x > 0, 0.0), ""),
    (torch.sin, ""),
    (lambda x: CELL(x, x), "gru_cell"),
    (lambda x: checkpoint(lambda y: y.sin() @ y.mT, x, use_reentrant=False), MOVED),
    (lambda x: checkpoint(lambda y: y.sin() @ y.transpose(0, 1), x, use_reentrant=False), ""),
]


@pytest.mark.parametrize(("call", "name"), CALLS)
def test_departures_have_a_note_each(call: Callable[[Tensor], Tensor], name: str) -> None:
    region = recorded(Calling(call).train(), torch.ones(4, 3))
    assert [note.split(" ")[0] for note in departures([region.graph_module])] == ([name] if name else [])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].pow(2).mean()


def test_a_plan_names_the_operator() -> None:
    plan = memopt.plan(Recurrent().train(), 1, (torch.ones(2, 3, 8),), optimizer=torch.optim.SGD, precision="fp32")
    assert any(note.startswith("lstm does not give the same bits as in eager mode") for note in plan.notes)


class Checkpointed(nn.Module):
    """Has a block under activation checkpointing, with running statistics or without."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), norm

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("norm", "named"),
    [
        (nn.BatchNorm1d(16), True),
        (nn.InstanceNorm1d(4, track_running_stats=True), True),
        (nn.InstanceNorm1d(4), False),
        (nn.LayerNorm(16), False),
    ],
)
def test_buffers_written_under_a_checkpoint_are_named(norm: nn.Module, named: bool) -> None:
    x = torch.randn(8, 16) if isinstance(norm, (nn.BatchNorm1d, nn.LayerNorm)) else torch.randn(8, 4, 16)
    plan = memopt.plan(Checkpointed(norm), 1, x, precision="fp32", allow={"recompute"})
    assert (BUFFERS_WRITTEN_ONCE in plan.notes) is named


class Writing(nn.Module):
    """Writes to its buffer, or to a copy of it, by `write`."""

    def __init__(self, write: Callable[[Tensor, Tensor], object], copies: bool = False) -> None:
        super().__init__()
        self.register_buffer("steps", torch.ones(16))
        self.write, self.copies = write, copies

    def forward(self, x: Tensor) -> Tensor:
        steps = self.steps.clone() if self.copies else self.steps
        self.write(steps, x.detach().mean(0))
        return x.contiguous() * steps  # type: ignore[no-any-return]


def set_row(steps: Tensor, x: Tensor) -> None:
    steps.view(4, 4)[0] = x[:4]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        operator.iadd,
        operator.imul,
        operator.itruediv,
        torch.Tensor.add_,
        lambda steps, x: steps[:2].mul_(x[:2]),
        set_row,
        lambda steps, x: torch.add(steps, x, out=steps),
        lambda steps, x: torch._foreach_mul_([steps], 2.0),
        lambda steps, x: nn.functional.relu(steps, inplace=True),
    ],
)
def test_every_way_to_write_to_a_buffer_under_a_checkpoint_is_seen(
    write: Callable[[Tensor, Tensor], object], copies: bool
) -> None:
    region = recorded(Checkpointed(Writing(write, copies)).train(), torch.randn(8, 16))
    assert (BUFFERS_WRITTEN_ONCE in departures([region.graph_module])) is not copies


class Nested(Checkpointed):
    """Has its block under two checkpoints, one within the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_buffers_written_under_a_checkpoint_within_another_are_named() -> None:
    plan = memopt.plan(Nested(nn.BatchNorm1d(16)), 1, torch.randn(8, 16), precision="fp32", allow={"recompute"})
    assert BUFFERS_WRITTEN_ONCE in plan.notes


class Broken(nn.Module):
    """Has a graph break before a transposed convolution, whose gradient is not contiguous; or none."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.breaks = nn.Linear(16, 16), breaks
        self.convolution = nn.ConvTranspose1d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.convolution(x.transpose(1, 2)).pow(2).mean()


@pytest.mark.parametrize("breaks", [True, False])
def test_sums_over_gradients_between_regions_are_named(breaks: bool) -> None:
    torch.manual_seed(0)
    model, batch = Broken(breaks).train(), torch.randn(3, 12, 16)
    plan = memopt.plan(model, 1, batch, precision="fp32", allow={"recompute"}, optimizer=None)
    assert (BETWEEN_REGIONS in plan.notes) is breaks
