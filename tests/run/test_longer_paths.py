"""Models whose values, random numbers or settings choose how many of their layers run."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memopt
from memopt.compat.autograd import next_node_number
from memopt.errors import GIB
from memopt.run.plain_forward import LongerPath, ends_beyond
from memopt.saved_values import draws_so_far, extreme_draws
from tests.elsewhere import counted
from tests.run.pieces import session_for

__all__ = ["counted"]

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
WIDTH, ROWS = 64, 1024


class Deep(nn.Module):
    """Residual blocks with batch normalisation; `depth` is how many of them run."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.BatchNorm1d(2 * WIDTH),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 10)
        self.number = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for depth, block in enumerate(self.blocks, 1):
            if self.ends(x, depth):
                break
            x = x + block(x)
        return self.head(x).square().mean()

    def ends(self, x: torch.Tensor, depth: int) -> bool:
        raise NotImplementedError


class ByValues(Deep):
    """Runs as many blocks as the first number of the batch says."""

    def ends(self, x: torch.Tensor, depth: int) -> bool:
        return bool(self.wanted < depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.wanted = x[0, 0].detach()
        return super().forward(x)


class ByRandomNumbers(Deep):
    """Leaves out each block by a random number of Python's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = x + block(x)
        return self.head(x).square().mean()


class BySchedule(Deep):
    """Runs more blocks as training goes on."""

    def ends(self, x: torch.Tensor, depth: int) -> bool:
        return depth > self.number


DEPTHS = 1, 2, 1, 1, 8, 2, 8, 5
SCHEDULE = 1, 2, 1, 2, 1, 2, 1, 8


def train(make: Callable[[], Deep], budget_bytes: float = 0) -> tuple[list[int], list[float], list[torch.Tensor], Any]:
    torch.manual_seed(0)
    random.seed(33)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if budget_bytes:
        memopt.optimize(model, budget_bytes / GIB, optimizer=optimizer, **EXACT)
    peaks, losses = [], []
    for number, depth in enumerate(DEPTHS):
        if make is BySchedule:
            model.number = SCHEDULE[number]
        with memopt.measure_peak() as peak:
            x = torch.randn(ROWS, WIDTH)
            x[0, 0] = depth
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        peaks.append(peak.bytes)
        losses.append(loss.item())
        del x, loss
    return peaks, losses, [one.detach().clone() for one in model.state_dict().values()], model


@pytest.mark.slow
@pytest.mark.parametrize("make", [ByValues, ByRandomNumbers, BySchedule])
@pytest.mark.usefixtures("counted")
def test_a_longer_path_is_counted_before_it_exceeds_the_budget(make: type[Deep]) -> None:
    peaks, losses, trained, plain = train(make)
    del plain
    gc.collect()
    budget = 0.7 * max(peaks)
    own_peaks, own_losses, own_trained, _ = train(make, budget)
    assert max(own_peaks) <= budget
    assert own_losses == losses
    assert all(map(torch.equal, own_trained, trained))


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_longer_path_that_does_not_fit_ends_no_run() -> None:
    peaks, losses, trained, plain = train(ByValues)
    del plain
    gc.collect()
    with pytest.warns(UserWarning, match="training goes on, and such steps may exceed the budget"):
        own_peaks, own_losses, own_trained, _ = train(ByValues, 0.34 * max(peaks))
    assert max(own_peaks) < 0.8 * max(peaks)
    assert own_losses == losses
    assert all(map(torch.equal, own_trained, trained))


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_the_first_refusal_names_a_budget_for_all_layers_that_may_run() -> None:
    peaks, losses, _, plain = train(ByRandomNumbers)
    del plain
    gc.collect()
    with pytest.raises(memopt.BudgetError) as refused:
        train(ByRandomNumbers, 0.2 * max(peaks))
    budget = refused.value.smallest_bytes
    del refused
    gc.collect()
    own_peaks, own_losses, *_ = train(ByRandomNumbers, budget)
    assert max(own_peaks) <= budget <= 1.02 * max(peaks)
    assert own_losses == losses


def test_extreme_draws_are_the_highest_and_the_lowest() -> None:
    expected = random.getstate(), draws_so_far()
    for highest in (False, True):
        with extreme_draws(highest=highest):
            drawn = [random.random(), *np.random.rand(3)]
        assert all(round(number) == highest == round(number, 6) for number in drawn)
    assert (random.getstate(), draws_so_far()) == expected


def test_a_forward_that_has_ended_is_undone() -> None:
    model, x = ByRandomNumbers(), torch.randn(8, WIDTH)
    random.seed(0)
    with ends_beyond(model, ((x,), {}), 0):  # the first one is looked at
        model(x)
    number, before = next_node_number(), [one.clone() for one in model.buffers()]
    random.seed(1)
    expected = random.random()
    random.seed(1)
    with pytest.raises(LongerPath), ends_beyond(model, ((x,), {}), 10):
        model(x)
    assert 10 < next_node_number() - number < 20
    assert random.random() == expected
    assert all(map(torch.equal, model.buffers(), before))
    with ends_beyond(model, ((x,), {}), 100):
        model(x)
    assert not all(map(torch.equal, model.buffers(), before))


def test_a_forward_that_writes_to_a_large_buffer_does_not_end() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    large = torch.zeros(2**15)
    model.register_buffer("large", large)

    def write(*_: Any) -> None:
        large.add_(1)

    model.register_forward_pre_hook(write)
    for _ in range(2):
        with ends_beyond(model, ((), {}), 0):
            model(torch.randn(8, 4))


def test_parameters_that_a_forward_writes_to_are_restored() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def write(*_: Any) -> None:
        model[0].bias.data.add_(1)

    model[0].register_forward_pre_hook(write)
    with ends_beyond(model, ((), {}), 0):
        model(torch.randn(8, 4))
    before = model[0].bias.detach().clone()
    with pytest.raises(LongerPath), ends_beyond(model, ((), {}), 0):
        model(torch.randn(8, 4))
    assert torch.equal(model[0].bias, before)


def test_a_longer_path_of_an_outer_model_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of calls may end the forward of an optimised model within the one that is counted."""
    session, tried = session_for(nn.Linear(4, 4)), []

    def ended(calls: Any, now: Any) -> Any:
        tried.append(now.may_end)
        raise LongerPath

    monkeypatch.setattr(session, "_as_it_fits", ended)
    with pytest.raises(LongerPath):
        session._train(session.forward, ((torch.randn(2, 4),), {}))
    assert tried == [True, False]
