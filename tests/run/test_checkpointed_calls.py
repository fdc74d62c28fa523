"""Forwards that cannot be captured whole run with activation checkpoints where no plan of their regions fits."""

from __future__ import annotations

import gc
import re
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memopt
from memopt.account.plain_count import count_on_values
from memopt.errors import BudgetError, CaptureError
from memopt.run import plain_counter
from memopt.run.checkpoints import RecomputedOtherwiseError, choices
from memopt.run.session import session_of
from tests.elsewhere import counted

__all__ = ["counted"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(16, 16, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


class Periods(nn.Module):
    """As TimesNet: a loop over periods that are read from values. It counts its calls, and has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = Net(), 0
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        widths = 96 // torch.fft.rfft(x.detach(), dim=1).abs().mean((0, 2)).topk(3).indices.clamp(2, 48).numpy()
        parts = []
        for width in widths:
            y = x
            if 96 % width != 0:
                y = torch.cat([x, x.new_zeros(x.shape[0], width - 96 % width, x.shape[2])], 1)
            y = y.reshape(x.shape[0], -1, width, x.shape[2]).permute(0, 3, 1, 2).contiguous()
            y = self.net(y).permute(0, 2, 3, 1).reshape(x.shape[0], -1, x.shape[2])
            parts.append(y[:, :96])
        self.aux = parts[0].mean().square()
        stacked = torch.stack(parts, -1)
        return x + stacked.softmax(-1).mul(stacked).sum(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Periods() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean() + sum(block.aux for block in self.blocks)


BATCHES = torch.randn(4, 32, 96, 16, generator=torch.Generator().manual_seed(1))


class WithWideLayer(Model):
    """Its gradients are as large as its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 2**16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.wide(x.mean((0, 1))).square().mean()


def train(
    budget_bytes: float = 0, kind: type[Model] = Model, *, late: bool = False
) -> tuple[list[int], list[float], dict[str, torch.Tensor], nn.Module]:
    """The peaks and losses of a few steps, and what is trained. `late`: the gradients of a step are there until the
    forward of the next one has ended."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters())
    if budget_bytes:
        memopt.optimize(
            model, budget_bytes / 2**30, optimizer=optimizer, precision="fp32", allow={"recompute", "reinplace"}
        )
    peaks, losses = [], []
    torch.manual_seed(2)
    for batch in BATCHES:
        with memopt.measure_peak() as peak:
            if not late:
                optimizer.zero_grad()
            loss = model(batch)
            if late:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        peaks.append(peak.bytes)
        losses.append(loss.item())
    return peaks, losses, {name: value.clone() for name, value in model.state_dict().items()}, model


@pytest.mark.usefixtures("counted")
def test_it_trains_bitwise_within_a_budget_that_no_plan_of_its_regions_meets() -> None:
    peaks, losses, trained, plain = train()
    budget = 0.6 * max(peaks)
    del plain
    gc.collect()
    own_peaks, own_losses, own_trained, model = train(budget)
    assert max(own_peaks) <= budget
    assert own_losses == losses
    assert all(torch.equal(value, trained[name]) for name, value in own_trained.items())
    assert [block.calls for block in model.blocks] == [len(BATCHES)] * 3
    status = memopt.status(model)
    assert status.state is memopt.State.CHECKPOINTED
    assert "blocks.0 to blocks.2 (3 modules)" in str(status)
    with pytest.raises(ValueError, match="trains without a plan: blocks"):
        memopt.plan_of(model)


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_refusal_names_the_line_that_breaks_the_graph_and_a_budget_that_works() -> None:
    """With what lies elsewhere in the process, which the meter sees as well."""
    elsewhere = torch.zeros(2**18)
    with pytest.raises(BudgetError) as refused:
        train(2**21)
    assert re.search(r"test_checkpointed_calls.py:\d+, in forward", str(refused.value))
    named = refused.value.smallest_bytes
    del refused
    gc.collect()
    assert max(train(named)[0]) <= named
    assert named > elsewhere.nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_named_budget_has_room_for_gradients_that_stay_until_the_next_forward_has_ended() -> None:
    with pytest.raises(BudgetError) as refused:
        train(2**21, WithWideLayer, late=True)
    named = refused.value.smallest_bytes
    del refused
    gc.collect()
    own_peaks, own_losses, *_ = train(named, WithWideLayer, late=True)
    assert max(own_peaks) <= named
    assert own_losses == train(0, WithWideLayer, late=True)[1]


class Unsteady(nn.Module):
    """Returns something else at each call, and does not say so in its attributes."""

    calls: ClassVar[list[int]] = [0]

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return self.lin(x).tanh() * self.calls[0]


def test_a_module_that_returns_other_values_when_it_runs_again_is_noticed() -> None:
    model = nn.Sequential(Unsteady(), Unsteady())
    (choice,) = choices(model)
    x = torch.randn(4, 8)
    with choice.active(), choice.checked(), pytest.raises(RecomputedOtherwiseError, match="Unsteady"):
        model(x).sum().backward()


def test_blocks_are_the_elements_of_the_outermost_lists_and_then_their_parts() -> None:
    blocks, parts, parts_of_these = choices(nn.Sequential(nn.Linear(16, 16), Model()))
    assert str(blocks) == "1.blocks.0 to 1.blocks.2 (3 modules)"
    assert [type(spot.module) for spot in blocks.spots] == [Periods] * 3
    assert [[type(part.module) for part in spot.within] for spot in parts.spots] == [[Net]] * 3
    assert all(type(part.within[0].module) is nn.Sequential for spot in parts_of_these.spots for part in spot.within)
    assert not list(choices(nn.Linear(2, 2)))


def test_calls_are_counted_again_once_others_of_its_parameters_are_trained() -> None:
    calls = session_of(memopt.optimize(Model(), 1.0)).forward  # type: ignore[union-attr]
    before = calls.checkpointed._calls
    calls.forget_without_state(frozenset({1}), frozenset(), None)
    assert calls.checkpointed._calls is before
    calls.forget_without_state(frozenset({1, 2}), frozenset(), None)
    assert calls.checkpointed._calls is not before


class Routed(nn.Module):
    """A loop over the experts that a batch reaches, which Dynamo ends with an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(32, 4), nn.LayerNorm(32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        weights = self.gate(hidden).softmax(-1)
        best = weights.argmax(-1)
        result = torch.zeros_like(x)
        for number in best.unique().tolist():
            rows = best == number
            result[rows] = self.experts[number](hidden[rows]) * weights[rows][:, number : number + 1]
        return x + result


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_a_loop_over_the_experts_that_are_reached_trains_within_a_budget() -> None:
    def steps(budget_bytes: float = 0) -> tuple[int, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Routed() for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        if budget_bytes:
            memopt.optimize(model, budget_bytes / 2**30, optimizer=optimizer, precision="fp32", allow={"recompute"})
        losses = []
        with memopt.measure_peak() as peak:
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.randn(64, 64, 32)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return peak.bytes, losses

    peak, losses = steps()
    gc.collect()
    own_peak, own_losses = steps(0.7 * peak)
    assert own_losses == losses
    assert own_peak <= 0.7 * peak
    with pytest.raises(CaptureError, match="data-dependent"):
        steps(0.1 * peak)


def routed(budget_bytes: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Routed() for _ in range(3)))
    memopt.optimize(model, budget_bytes / 2**30, optimizer=None, precision="fp32", allow={"recompute"})
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_the_smallest_budget_that_a_refusal_names_serves_the_same_call() -> None:
    """Small enough for the tolerance to matter."""
    batch = torch.randn(32, 32, 32)
    with pytest.raises(BudgetError) as refused:
        routed(BATCHES.nbytes + 4 * 2**19)(batch)
    named = refused.value.smallest_bytes
    del refused
    gc.collect()
    model = routed(named)
    model(batch).square().mean().backward()
    assert memopt.status(model).state is memopt.State.CHECKPOINTED


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_batches_that_fit_are_not_refused_since_others_of_their_sizes_might_not() -> None:
    batches = torch.randn(3, 64, 32, 32)

    def train(budget_bytes: float) -> tuple[int, list[float]]:
        model, losses = routed(budget_bytes), []
        with memopt.measure_peak() as peak:
            for batch in batches:
                loss = model(batch).square().mean()
                loss.backward()
                losses.append(loss.item())
                model.zero_grad()
                del loss
        assert memopt.status(model).state in (memopt.State.CHECKPOINTED, memopt.State.PLAIN)
        return peak.bytes, losses

    plain, losses = train(2**30)
    gc.collect()
    peak, own_losses = train(0.6 * plain)
    assert peak <= 0.6 * plain
    assert own_losses == losses


@pytest.mark.usefixtures("counted")
def test_a_count_on_values_leaves_room_for_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    def count(*args: Any, **options: Any) -> Any:
        limits.append(args[4])
        return count_on_values(*args, **options)

    monkeypatch.setattr(plain_counter, "count_on_values", count)
    budget, elsewhere, output = 16 * 2**20, torch.zeros(2**20), None
    model = routed(budget)
    for rows in (40, 60):
        kept = 0 if output is None else output.nbytes
        output = model(torch.randn(rows, 32, 32))
        output.square().mean().backward()
        assert limits
        assert max(limits) <= budget - elsewhere.nbytes - BATCHES.nbytes - kept
        limits.clear()


class SavedInHalf(nn.Module):
    """Blocks, some of which save their tensors in 16 bits, by hooks that torch.compile does not capture."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.half(), lambda packed: packed.float()):
            x = self.blocks[1](torch.tanh(self.blocks[0](x)))
        for block in self.blocks[2:]:
            x = torch.tanh(block(x))
        return x


def test_what_hooks_of_the_model_change_is_changed_where_modules_run_as_checkpoints() -> None:
    """The checkpoints' own hooks took the place of the model's: gradients were those of tensors saved in 32 bits."""

    def gradients(budget_gb: float = 0) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = SavedInHalf()
        if budget_gb:
            options: dict[str, Any] = {"allow": {"recompute", "reinplace"}, "optimizer": None, "elsewhere_gb": 0}
            memopt.optimize(model, budget_gb, precision="fp32", **options)
        model(torch.randn(512, 64)).square().mean().backward()
        if budget_gb:
            assert memopt.status(model).state is memopt.State.CHECKPOINTED
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, gradients(0.00168), gradients()))
