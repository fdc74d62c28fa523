"""Batches that are smaller than those that were planned, as the last one of an epoch: a plan of their own is made once
they have lost as much time without one as it takes to make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.operators import Rewriting
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan_search import Decided
from memopt.run.session import session_of
from tests.elsewhere import counted

__all__ = ["counted"]

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
DATA = torch.randn(64, 32, 48, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(48), nn.Dropout(0.1)
        self.layers = nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.layers(self.norm(x)))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(
    sizes: Sequence[int], budget_bytes: float = 0, **options: Any
) -> tuple[nn.Module, list[int], list[float], list[memopt.State]]:
    """The trained model, and the peak, the loss and the state of each step."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    if budget_bytes:
        memopt.optimize(model, budget_bytes / 2**30, optimizer=optimizer, **EXACT, **options)
    peaks, losses, states = [], [], []
    torch.manual_seed(2)
    for size in sizes:
        with memopt.measure_peak() as peak:
            optimizer.zero_grad()
            loss = model(DATA[:size])
            loss.backward()
            optimizer.step()
        peaks.append(peak.bytes)
        losses.append(loss.item())
        states += [memopt.status(model).state] if budget_bytes else []
        del loss
    return model, peaks, losses, states


@pytest.mark.usefixtures("counted")
def test_they_run_with_checkpoints_or_plain_to_the_bit_and_within_the_budget() -> None:
    sizes = (32, 32, 24, 32, 8, 24)
    plain, peaks, losses, _ = train(sizes)
    budget = 0.5 * max(peaks)
    model, own_peaks, own_losses, states = train(sizes, budget)
    planned, checkpointed = memopt.State.PLANNED, memopt.State.CHECKPOINTED
    assert states == [planned, planned, checkpointed, planned, memopt.State.PLAIN, checkpointed]
    assert own_losses == losses
    assert max(own_peaks) <= budget
    pairs = zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert memopt.plan_of(model).budget_bytes == int(budget)


@pytest.mark.slow
def test_those_of_a_batch_that_was_planned_ahead_do_so_too() -> None:
    _, peaks, losses, _ = train((32, 24))
    _, _, own_losses, states = train((32, 24, 8), 0.5 * max(peaks), example_inputs=(DATA[:32],))
    assert states == [memopt.State.PLANNED, memopt.State.CHECKPOINTED, memopt.State.PLAIN]
    assert own_losses[:2] == losses


@pytest.mark.slow
def test_they_are_planned_once_they_have_lost_as_much_time_as_that_takes() -> None:
    _, peaks, *_ = train((32, 24))
    budget = 0.5 * max(peaks)
    model, *_ = train((32, 24), budget)
    session = session_of(model)
    assert session is not None
    session.forward.road.planning_seconds = 0.0
    model(DATA[:24]).backward()
    assert memopt.status(model).state is memopt.State.PLANNED
    _ = model(DATA[:20]).backward()  # by the same plan
    assert memopt.status(model).state is memopt.State.PLANNED
    assert session.forward.road.plans <= 3  # beside that for gradients that are there


SEEN: list[torch.Tensor] = []


def _by_global(block: Block, x: torch.Tensor) -> None:
    SEEN.append(x.mean())


def _by_attribute(block: Block, x: torch.Tensor) -> None:
    block.dropout.seen = block.dropout.seen + 1


@pytest.mark.parametrize("change", [_by_global, _by_attribute])
def test_code_that_changes_objects_runs_once(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    forward = Block.forward
    monkeypatch.setattr(nn.Dropout, "seen", 0, raising=False)

    def changing(block: Block, x: torch.Tensor) -> torch.Tensor:
        change(block, x)
        return forward(block, x)

    monkeypatch.setattr(Block, "forward", changing)
    _, peaks, losses, _ = train((32, 24))
    SEEN.clear()
    _, _, own_losses, states = train((32, 24), 0.5 * max(peaks))
    assert states == [memopt.State.PLANNED] * 2
    assert own_losses == losses


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("share", [0.4, 0.45])
def test_to_try_whether_checkpoints_fit_exceeds_no_budget(share: float) -> None:
    _, peaks, losses, _ = train((32, 32, 30))
    _, own_peaks, own_losses, _ = train((32, 32, 30), share * max(peaks))
    assert own_losses == losses
    assert max(own_peaks) <= share * max(peaks)


@pytest.mark.slow
def test_larger_ones_are_planned() -> None:
    _, peaks, *_ = train((32,))
    *_, states = train((24, 32, 24), 0.5 * max(peaks))
    assert states[1:] == [memopt.State.PLANNED] * 2


@pytest.mark.slow
def test_where_plans_are_wanted_always_they_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    _, peaks, *_ = train((32,))
    *_, states = train((32, 24), 0.5 * max(peaks))
    assert states == [memopt.State.PLANNED] * 2


@pytest.mark.slow
def test_their_plan_begins_with_the_levers_of_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_PLAN", "always")
    tried: list[Rewriting] = []
    trace = CallPlanner._trace

    def noted(planner: CallPlanner, captured: Any, rewriting: Rewriting) -> Any:
        tried.append(rewriting)
        return trace(planner, captured, rewriting)

    monkeypatch.setattr(CallPlanner, "_trace", noted)
    _, peaks, *_ = train((32,))

    def plans() -> tuple[memopt.Plan, memopt.Plan, list[Rewriting]]:
        """Those of a batch and of a smaller one, and the sets of levers that the second one tried."""
        torch.manual_seed(0)
        model = Model()
        memopt.optimize(model, 0.5 * max(peaks) / 2**30, optimizer=torch.optim.AdamW)
        model(DATA[:32]).backward()
        first = memopt.plan_of(model)
        tried.clear()
        model.zero_grad()
        model(DATA[:24]).backward()
        return first, memopt.plan_of(model), list(tried)

    first, second, sets = plans()
    assert first.captured is not None
    assert sets == [first.captured.rewriting]
    assert second.levers == first.levers
    assert second.receipt[0].lever == " + ".join(name for name in first.levers if name != "reinplace")
    assert any("the levers are those of the plan for other sizes" in note for note in second.notes)
    monkeypatch.setattr(Decided, "by", lambda plan: None)
    _, searched, sets = plans()
    assert len(sets) > 1
    assert second.added_time <= searched.added_time + 0.005
    assert second.predicted_peak_bytes <= second.budget_bytes
